select position, topic, type, id, key, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event
where position > ?1 and position <= ?2
order by position
limit ?3
