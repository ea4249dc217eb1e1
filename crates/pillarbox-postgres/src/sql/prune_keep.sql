-- Copies what deliveries still need of a leaf.
insert into event_kept (
    position, id, topic, key, type, payload, payload_bytes, content_type, headers, stream_version, deliver_at, created_at
)
select position, id, topic, key, type, payload, payload_bytes, content_type, headers, stream_version, deliver_at, created_at
from event
where position >= $1::bigint and position < $2::bigint
    and position in (select d.position from delivery as d where d.position >= $1 and d.position < $2)
on conflict (position) do nothing
