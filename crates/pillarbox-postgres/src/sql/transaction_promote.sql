select @schema@.promote(array_fill($1::bigint, array[cardinality($2::text[])]), $2)
