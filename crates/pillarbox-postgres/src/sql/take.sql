-- In lane order, so that nobody waits in a circle. The instance's row stays while its lanes are taken, and an owner that was
-- seen to stand still at a beat cannot beat meanwhile: one that has beaten since lives.
with me as (
    select id from instance where id = $1 for key share
), wanted as (
    select * from unnest($2::bigint[], $3::integer[], $4::bigint[], $5::bigint[]) with ordinality
        as w (subscription, lane, expected, beat, ordinal)
), owners as (
    select i.id, i.beat
    from instance as i
    where i.id in (
        select c.owner
        from cursor as c
        join wanted as w on w.subscription = c.subscription and w.lane = c.lane
        where w.beat is not null
    )
    order by i.id
    for share
), locked as (
    select c.subscription, c.lane, c.epoch, c.owner, w.ordinal
    from cursor as c
    join wanted as w on w.subscription = c.subscription and w.lane = c.lane
    where c.epoch = w.expected
        and exists (select from me)
        and not exists (select from owners as o where o.id = c.owner and o.beat <> w.beat)
    order by c.subscription, c.lane
    for update of c
)
update cursor as c
set owner = $1, epoch = c.epoch + 1,
    takeovers = c.takeovers + case when l.owner is not null and l.owner <> $1 then 1 else 0 end
from locked as l
where c.subscription = l.subscription and c.lane = l.lane and c.epoch = l.epoch
returning l.ordinal, c.epoch, l.owner
