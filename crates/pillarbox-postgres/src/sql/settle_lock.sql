-- The fence: a lane whose epoch has moved on is not among the answers, and the others cannot move before the commit. Everything that
-- the same settlement writes looks at the epoch again; it is sent before this is answered.
select c.subscription, c.lane, c.revision
from cursor as c
join unnest($1::bigint[], $2::integer[], $3::bigint[]) as w (subscription, lane, epoch)
    on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch
order by c.subscription, c.lane
for update of c
