-- The keys of queues' lanes that have a row.
select distinct w.ordinal, d.key
from unnest($1::bigint[], $2::integer[]) with ordinality as w (subscription, lane, ordinal)
join subscription as s on s.id = w.subscription and s.mode = 'queue'
join delivery as d on d.subscription = w.subscription and d.lane = w.lane and d.key is not null
