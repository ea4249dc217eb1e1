insert into cursor (subscription, lane, floor, settled)
select n.subscription, n.lane, n.floor, n.settled::int8multirange
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::text[]) as n (subscription, lane, floor, settled)
