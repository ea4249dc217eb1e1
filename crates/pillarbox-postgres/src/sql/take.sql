-- In lane order, so that nobody waits in a circle. The instance's row stays while its lanes are taken.
with me as (
    select id from instance where id = $1 for key share
), wanted as (
    select * from unnest($2::bigint[], $3::integer[], $4::bigint[]) with ordinality
        as w (subscription, lane, expected, ordinal)
), locked as (
    select c.subscription, c.lane, c.epoch, c.owner, w.ordinal
    from cursor as c
    join wanted as w on w.subscription = c.subscription and w.lane = c.lane
    where c.epoch = w.expected and exists (select from me)
    order by c.subscription, c.lane
    for update of c
)
update cursor as c
set owner = $1, epoch = c.epoch + 1,
    takeovers = c.takeovers + case when l.owner is not null and l.owner <> $1 then 1 else 0 end
from locked as l
where c.subscription = l.subscription and c.lane = l.lane and c.epoch = l.epoch
returning l.ordinal, c.epoch, l.owner
