-- Old records that follow each other without a gap become one an hour.
with groups as (
    select
        min(id) as first, array_agg(id) as ids, min(floor_from) as floor_from, max(floor_to) as floor_to,
        max(ended_at) as ended_at
    from progress
    where ended_at < clock_timestamp() - interval '1 hour' and epoch > 0
    group by subscription, lane, epoch, date_trunc('hour', started_at)
    having count(*) > 1 and sum(floor_to - floor_from) = max(floor_to) - min(floor_from)
    limit $1::bigint
), gone as (
    delete from progress as p using groups as g where p.id = any (g.ids) and p.id <> g.first
)
update progress as p
set floor_from = g.floor_from, floor_to = g.floor_to, ended_at = g.ended_at
from groups as g
where p.id = g.first
