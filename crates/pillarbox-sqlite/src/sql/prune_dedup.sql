delete from pillarbox_dedup
where (topic, key, dedup_key) in (
    select topic, key, dedup_key from pillarbox_dedup where created_at < ?1 order by created_at limit ?2
)
