delete from pillarbox_instance
where id = ?1 and beat_at < ?2
    and not exists (select 1 from pillarbox_cursor where owner = ?1)
    and not exists (select 1 from pillarbox_delivery where owner = ?1)
