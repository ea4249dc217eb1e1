-- Copies what deliveries still need of a leaf.
insert into event_kept (
    position, id, topic, key, type, payload, payload_bytes, content_type, headers, stream_version, deliver_at, created_at
)
select
    position, coalesce(id, event_id(position, created_at)), topic, key, type, payload, payload_bytes, content_type,
    coalesce(headers, '{}'), stream_version, deliver_at, created_at
from event
where position >= $1::bigint and position < $2::bigint
    and position in (
        -- Subscription by subscription, by the index of the primary key.
        select d.position
        from subscription as s
        cross join lateral (
            select position from delivery where subscription = s.id and position >= $1 and position < $2
        ) as d
    )
on conflict (position) do nothing
