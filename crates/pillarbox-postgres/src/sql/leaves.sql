-- The leaves in order, each with the time of its first event.
select
    l.name, l.low, l.high, l.emptied,
    (
        select e.created_at
        from event as e
        where e.position >= l.low and e.position < coalesce(l.high, 9223372036854775807)
        order by e.position
        limit 1
    )
from leaf as l
order by l.low
