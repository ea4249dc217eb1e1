update delivery
set state = 'pending', attempts = 0, due_at = clock_timestamp(), died_at = null
where subscription = $1::bigint and position = any($2::bigint[])
