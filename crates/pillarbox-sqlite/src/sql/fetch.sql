select position, topic, type, id, key, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event
where position = ?1
union all
select position, topic, type, id, key, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event_kept
where position = ?1
limit 1
