update activity set broadcasts = broadcasts + 1 where person = $1 and number = $2
