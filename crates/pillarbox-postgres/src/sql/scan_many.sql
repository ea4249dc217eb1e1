-- Several stretches of the log in one snapshot; see scan.sql.
select
    e.position, e.topic, e.type, e.id, e.key,
    case when $4 or e.topic = any($5) or e.topic like any($6) then e.payload end,
    case when $4 or e.topic = any($5) or e.topic like any($6) then e.payload_bytes end,
    case when $4 or e.topic = any($5) or e.topic like any($6) then e.content_type end,
    case when $4 or e.topic = any($5) or e.topic like any($6) then e.headers end,
    e.stream_version, e.deliver_at, e.created_at,
    s.number
from unnest($1::bigint[], $2::bigint[], $3::bigint[]) with ordinality as s (after, upto, rows, number)
cross join lateral (
    select * from event where position > s.after and position <= s.upto order by position limit s.rows
) as e
