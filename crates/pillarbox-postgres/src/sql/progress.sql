-- What floors have passed, and under which epoch. Epoch 0: what a lane was never to deliver.

-- name: insert
insert into progress (subscription, lane, epoch, floor_from, floor_to)
select $1::bigint, $2::integer, $3::bigint, p.floor_from, p.floor_to
from unnest($4::bigint[], $5::bigint[]) as p (floor_from, floor_to)

-- name: before_start
-- What lanes were never to deliver.
insert into progress (subscription, lane, epoch, floor_from, floor_to)
select n.subscription, n.lane, 0, n.floor_from, n.floor_to
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[]) as n (subscription, lane, floor_from, floor_to)

-- name: advance
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

-- name: settled_by
select epoch, started_at, ended_at
from progress
where subscription = $1::bigint and lane = $2::integer and floor_from < $3::bigint and floor_to >= $3 and epoch > 0
order by id desc
limit 1

-- name: is_before_start
select exists (
    select
    from progress
    where subscription = $1::bigint and lane = $2::integer and floor_from < $3::bigint and floor_to >= $3 and epoch = 0
)

-- name: ranges
-- What settlements have recorded, of the subscription $1 or of all.
select subscription, lane, floor_from + 1 as low, floor_to as high
from progress
where ($1 is null or subscription = $1) and epoch > 0
order by floor_from

-- name: ranges_before_start
-- What lanes were never to deliver, of the subscription $1 or of all.
select subscription, lane, floor_from + 1 as low, floor_to as high
from progress
where ($1 is null or subscription = $1) and epoch = 0
order by floor_from

-- name: take_before_start
delete from progress
where subscription = $1
    and lane = $2
    and epoch = 0
    and floor_from < $4
    and floor_to >= $3
returning floor_from, floor_to

-- name: remove_above
delete from progress where subscription = $1 and floor_from >= $2

-- name: cut
update progress set floor_to = $2 where subscription = $1 and floor_to > $2
