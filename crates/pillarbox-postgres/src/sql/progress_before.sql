-- What lanes were never to deliver.
insert into progress (subscription, lane, epoch, floor_from, floor_to)
select n.subscription, n.lane, 0, n.floor_from, n.floor_to
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[]) as n (subscription, lane, floor_from, floor_to)
