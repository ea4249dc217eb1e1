-- Nothing changes while somebody works on one of the key, or a dead one blocks it.
update pillarbox_delivery
set ready_at = max(due_at, ?3)
where subscription = ?1 and ready_at is null
    and position = (
        select position
        from (
            select position, arrival from (
                select position, arrival
                from pillarbox_delivery
                where subscription = ?1 and key = ?2 and state = 'pending'
                order by arrival
                limit 1
            )
            union all
            select position, arrival from (
                select position, arrival
                from pillarbox_delivery
                where subscription = ?1 and key = ?2 and state = 'retrying'
                order by arrival
                limit 1
            )
        )
        order by arrival
        limit 1
    )
    and not exists (
        select 1 from pillarbox_delivery where subscription = ?1 and key = ?2 and state = 'processing'
    )
    and not exists (
        select 1
        from pillarbox_delivery as dead
        join pillarbox_subscription as s on s.id = dead.subscription
        where dead.subscription = ?1 and dead.key = ?2 and dead.state = 'dead' and s.on_dead = 'block'
            and dead.arrival < pillarbox_delivery.arrival
    )
