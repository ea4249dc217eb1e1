-- Position by position (`offset 0`): each is looked for in its own leaf. Of an array, all are looked for in every leaf.
select
    w.position, coalesce(e.topic, k.topic), coalesce(e.type, k.type), coalesce(e.id, k.id, event_id(e.position, e.created_at)), coalesce(e.key, k.key),
    coalesce(e.payload, k.payload), coalesce(e.payload_bytes, k.payload_bytes), coalesce(e.content_type, k.content_type),
    coalesce(e.headers, k.headers), coalesce(e.stream_version, k.stream_version), coalesce(e.deliver_at, k.deliver_at),
    coalesce(e.created_at, k.created_at)
from (select distinct unnest($1::bigint[]) as position) as w
left join lateral (select * from event where position = w.position offset 0) as e on true
left join lateral (select * from event_kept where e.position is null and position = w.position offset 0) as k on true
where e.position is not null or k.position is not null
