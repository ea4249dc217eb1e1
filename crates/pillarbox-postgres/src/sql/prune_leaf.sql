-- The lowest leaf that is full and has no event of a journal, and when its last event was published.
select
    l.name, l.low, l.high,
    (
        select e.created_at
        from event as e
        where e.position >= l.low and e.position < l.high
        order by e.position desc
        limit 1
    )
from leaf as l
where not l.emptied
    and l.high <= $1::bigint + 1
    -- Not as an anti join, which would gather all events of all journals.
    and (
        select j.position
        from journal as j
        where j.position >= l.low and j.position < l.high
        limit 1
    ) is null
order by l.low
limit 1
