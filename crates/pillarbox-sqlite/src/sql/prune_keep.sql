insert or ignore into pillarbox_event_kept (
    position, id, topic, key, type, payload, content_type, headers, stream_version, deliver_at, created_at
)
select position, id, topic, key, type, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event
where stream_version is null
    and position in (select position from pillarbox_delivery where position > ?1 and position <= ?2)
