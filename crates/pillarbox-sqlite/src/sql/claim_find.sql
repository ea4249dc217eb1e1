select d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since, d.crashes
from pillarbox_delivery as d
join pillarbox_subscription as s on s.id = d.subscription
where d.subscription = ?1 and d.ready_at <= ?2 and (d.crashes < ?3 or ?4)
    and d.owner is null and d.state in ('pending', 'retrying')
    and not exists (
        select 1
        from pillarbox_delivery as other
        where other.subscription = d.subscription and other.key = d.key and other.state = 'processing'
    )
    and not exists (
        select 1
        from pillarbox_delivery as other
        where other.subscription = d.subscription and other.key = d.key
            and other.state in ('pending', 'retrying') and other.arrival < d.arrival
    )
    and not exists (
        select 1
        from pillarbox_delivery as other
        where other.subscription = d.subscription and other.key = d.key
            and other.state = 'dead' and other.arrival < d.arrival and s.on_dead = 'block'
    )
order by d.ready_at, d.position
