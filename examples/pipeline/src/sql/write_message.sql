insert into message (conversation, number, author, body) values ($1, $2, $3, $4)
