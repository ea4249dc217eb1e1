insert into mention (person, conversation, message) values ($1, $2, $3)
