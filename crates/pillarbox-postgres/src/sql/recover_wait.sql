-- Who was about to end a claim when he died has ended it after this, or it is left to be recovered. In the order in which everybody locks
-- deliveries; each is looked up by the primary key.
select
from (
    select h.subscription, h.position
    from delivery as h
    where h.owner = any ($1::integer[])
    order by h.subscription, h.position
    offset 0
) as h
cross join lateral (
    select from delivery as d where d.subscription = h.subscription and d.position = h.position
    offset 0
    for update
) as d
