-- Due now with attempts 0, whoever worked on it. In a queue the first of a key is promoted after the commit; what belongs to a key
-- of which another is being worked on gets a place behind all others, as nothing may stand before that one.
with wanted as (
    select
        d.subscription, d.position,
        case when head.owner is not null and head.position <> d.position then nextval('delivery_arrival_seq') end as arrival
    from delivery as d
    left join lateral (
        select h.position, h.owner
        from delivery as h
        where d.queued and h.subscription = d.subscription and h.key = d.key
            and h.state in ('pending', 'retrying', 'processing')
        order by h.arrival
        limit 1
    ) as head on true
    where d.subscription = $1::bigint and d.position = any($2::bigint[])
    order by d.position
)
update delivery as d
set state = 'pending', attempts = 0, due_at = clock_timestamp(), died_at = null, owner = null, claim = null, claimed_at = null,
    arrival = coalesce(w.arrival, d.arrival), ready_at = case when d.queued and d.key is null then clock_timestamp() end
from wanted as w
where d.subscription = any (array[w.subscription]) and d.position = w.position
returning case when d.queued then d.key end
