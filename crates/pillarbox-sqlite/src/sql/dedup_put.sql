insert into pillarbox_dedup (topic, key, dedup_key, id, created_at) values (?1, ?2, ?3, ?4, ?5)
on conflict (topic, key, dedup_key) do update set id = excluded.id, created_at = excluded.created_at
