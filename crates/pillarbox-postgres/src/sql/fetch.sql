select position, topic, type, id, key, payload, payload_bytes, content_type, headers, stream_version, deliver_at, created_at
from event
where position = any($1)
union all
select position, topic, type, id, key, payload, payload_bytes, content_type, headers, stream_version, deliver_at, created_at
from event_kept as k
where position = any($1) and not exists (select from event as e where e.position = k.position)
