-- The log: events, and the copies of them that deliveries still need.

-- name: horizon
-- The highest position handed out. A pruned log keeps it.
select max(
    coalesce((select seq from sqlite_sequence where name = 'pillarbox_event'), 0),
    coalesce((select max(position) from pillarbox_event), 0)
)

-- name: scan
-- One stretch of the log. The decoder reads the columns by their positions, here and in `fetch`.
select position, topic, type, id, key, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event
where position > ?1 and position <= ?2
order by position
limit ?3

-- name: fetch
-- One event, from the log or kept aside.
select position, topic, type, id, key, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event
where position = ?1
union all
select position, topic, type, id, key, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event_kept
where position = ?1
limit 1

-- name: id_at
select id from pillarbox_event where position = ?1

-- name: positions_of
select position from pillarbox_event where id in (?1, upper(?1))
union
select position from pillarbox_event_kept where id in (?1, upper(?1))
order by position

-- name: odd_ids
-- Ids that are not written as a uuid in lower case.
select position, id
from pillarbox_event
where id not glob '[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]'
union
select position, id
from pillarbox_event_kept
where id not glob '[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f]-[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]'

-- name: version_id
select id from pillarbox_event where key = ?1 and stream_version = ?2
union all
select id from pillarbox_event_kept where key = ?1 and stream_version = ?2
limit 1

-- name: backlog
-- Events without their payloads. The first columns are read by their positions, here and in `list` of delivery.sql.
select position, topic, type, key, deliver_at, created_at, id, headers
from pillarbox_event
where position > ?1
order by position
limit ?2

-- name: key_events
-- With whether the subscription ?3 has a row for it.
select
    e.position, e.id, e.topic, e.type,
    exists (select 1 from pillarbox_delivery as d where d.subscription = ?3 and d.position = e.position) as has_delivery
from pillarbox_event as e
where e.position > ?1 and e.key = ?2
order by e.position

-- name: next_of
-- Whether the next event above ?1 is older than ?2; of the log or of what is kept aside.
select position, created_at < ?2 as is_older from @table@ where position > ?1 order by position limit 1

-- name: first_since_of
select position from @table@ where position > ?1 and position <= ?2 and created_at >= ?3 order by position limit 1

-- name: last
select coalesce(max(position), 0) from pillarbox_event

-- name: count
select count(*) from pillarbox_event

-- name: kept_count
select count(*) from (select 1 from pillarbox_event_kept limit ?1)

-- name: kept_last
select coalesce(max(position), 0) from pillarbox_event_kept
