select position, coalesce(id, event_id(position, created_at)), topic, type
from event
where position > $1::bigint and key = $2::text
order by position
