select @schema@.accept($1::text, $2::text::uuid)
