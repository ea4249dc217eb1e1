update delivery as d
set state = 'pending', attempts = 0, due_at = clock_timestamp(), died_at = null
where d.subscription = $1::bigint and d.position > $2::bigint and not d.position <@ $3::text::int8multirange and d.state <> 'delayed'
    and not exists (select from event as e where e.position = d.position)
