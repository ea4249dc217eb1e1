select (
    select count(*) from pillarbox_delivery where subscription = ?1 and state in ('pending', 'retrying', 'processing')
) + coalesce((select count from pillarbox_aside_count where subscription = ?1 and state = 'delayed'), 0)
