-- Publishing.

-- name: event
insert into pillarbox_event (id, topic, key, type, payload, content_type, headers, deliver_at, created_at, stream_version)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)

-- name: dedup_put
insert into pillarbox_dedup (topic, key, dedup_key, id, created_at) values (?1, ?2, ?3, ?4, ?5)
on conflict (topic, key, dedup_key) do update set id = excluded.id, created_at = excluded.created_at

-- name: dedup_find
select id from pillarbox_dedup where topic = ?1 and key = ?2 and dedup_key = ?3 and created_at >= ?4
