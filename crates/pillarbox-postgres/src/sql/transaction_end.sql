-- Ends claims that are still this instance's, in the order in which everybody locks deliveries.
with ours as (
    select d.subscription, d.position, d.key
    from @schema@.delivery as d
    join unnest($3::bigint[], $4::bigint[]) as c (position, claim) on c.position = d.position and c.claim = d.claim
    where d.subscription = $1 and d.owner is not distinct from $2::bigint and d.position = any ($3::bigint[])
    order by d.position
    for update of d
)
delete from @schema@.delivery as d
using ours
where d.subscription = any (array[ours.subscription]) and d.position = ours.position
returning d.key
