-- Records what floors are about to pass, from the floor as it is stored: the newest row of a lane grows for a while, then another begins.
with w as (
    select n.subscription, n.lane, n.epoch, c.floor as floor_from, n.floor as floor_to
    from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[]) as n (subscription, lane, epoch, floor)
    join cursor as c on c.subscription = n.subscription and c.lane = n.lane and c.epoch = n.epoch
    where n.floor > c.floor
), extended as (
    update progress as p
    set floor_to = w.floor_to, ended_at = clock_timestamp()
    from w
    where p.id = (
            select n.id from progress as n
            where n.subscription = w.subscription and n.lane = w.lane
            order by n.id desc limit 1
        )
        and p.epoch = w.epoch and p.floor_to = w.floor_from and p.started_at > clock_timestamp() - $5::float8 * interval '1 ms'
    returning p.subscription, p.lane
)
insert into progress (subscription, lane, epoch, floor_from, floor_to)
select w.subscription, w.lane, w.epoch, w.floor_from, w.floor_to
from w
where (w.subscription, w.lane) not in (select e.subscription, e.lane from extended as e)
