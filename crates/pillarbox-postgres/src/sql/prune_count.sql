-- Each leaf that has events: its bounds, the last position, when that was published, and whether a journal has any of it.
select
    l.low, coalesce(l.high, 9223372036854775807), e.position, e.created_at,
    (
        select j.position
        from journal as j
        where j.position >= l.low and j.position < coalesce(l.high, 9223372036854775807)
        limit 1
    ) is not null
from leaf as l
cross join lateral (
    select e.position, e.created_at
    from event as e
    where e.position >= l.low and e.position < coalesce(l.high, 9223372036854775807)
    order by e.position desc
    limit 1
) as e
where not l.emptied
order by l.low
