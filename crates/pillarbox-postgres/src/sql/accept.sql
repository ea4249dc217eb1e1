select @schema@.accept($1, $2)
