select id from event where key = $1::text and stream_version = $2::bigint
union all
select id from event_kept where key = $1 and stream_version = $2
limit 1
