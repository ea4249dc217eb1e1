-- The journal. Appending inserts by `event` of publish.sql.

-- name: head
select name, topic, version from pillarbox_stream where name = ?1

-- name: raise
insert into pillarbox_stream (name, topic, version) values (?1, ?2, ?3)
on conflict (name) do update set version = excluded.version

-- name: read
-- The decoder reads the columns by their positions, as in `scan` of event.sql.
select position, topic, type, id, key, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event
where key = ?1 and stream_version between ?2 and ?3
order by stream_version
limit ?4

-- name: streams
select name, topic, version
from pillarbox_stream
where name > ?2 and substr(name, 1, length(?1)) = ?1
order by name
limit ?3
