-- The first delivery of the same key that another one waits for.
select coalesce(e.id, k.id, event_id(e.position, e.created_at)), head.position, head.state
from delivery as d
join subscription as s on s.id = d.subscription
cross join lateral (
    (
        select h.position, h.state, h.arrival
        from delivery as h
        where h.subscription = d.subscription and h.key = d.key and h.arrival < d.arrival
            and h.state in ('pending', 'retrying', 'processing')
        order by h.arrival
        limit 1
    )
    union all
    (
        select h.position, h.state, h.arrival
        from delivery as h
        where h.subscription = d.subscription and h.key = d.key and h.arrival < d.arrival and h.state = 'dead'
            and s.on_dead = 'block'
        order by h.arrival
        limit 1
    )
) as head
left join event as e on e.position = head.position
left join event_kept as k on k.position = head.position
where d.subscription = $1::bigint and d.position = $2::bigint
order by head.arrival
limit 1
