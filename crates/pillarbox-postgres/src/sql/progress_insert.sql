insert into progress (subscription, lane, epoch, floor_from, floor_to)
select $1::bigint, $2::integer, $3::bigint, p.floor_from, p.floor_to
from unnest($4::bigint[], $5::bigint[]) as p (floor_from, floor_to)
