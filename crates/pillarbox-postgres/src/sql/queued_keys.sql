-- The keys of queues' lanes with a row that their owner must not overtake; see claim_keys.sql.
select distinct w.ordinal, d.key
from unnest($1::bigint[], $2::integer[]) with ordinality as w (subscription, lane, ordinal)
join subscription as s on s.id = w.subscription and s.mode = 'queue'
cross join lateral (
    select l.key
    from delivery as l
    where l.subscription = w.subscription and l.lane = w.lane and l.state in ('pending', 'retrying', 'processing')
    union all
    select l.key from delivery as l where l.subscription = w.subscription and l.lane = w.lane and l.state = 'delayed'
    union all
    select l.key
    from delivery as l
    where l.subscription = w.subscription and l.lane = w.lane and l.state = 'dead'
) as d
where d.key is not null
