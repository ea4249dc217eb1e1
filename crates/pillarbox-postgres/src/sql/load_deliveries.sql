-- What the owners of lanes need: what is not dead; what is dead and is not settled, since its range was left out; and where dead events hold their key back,
-- the first dead one of each key, found key by key. One key more than $3 says that there are more.
with recursive lane as (
    select w.ordinal, w.subscription, w.lane, int8multirange(int8range(c.floor + 1, null)) - c.settled as open, s.on_dead = 'block' as blocks
    from unnest($1::bigint[], $2::integer[]) with ordinality as w (subscription, lane, ordinal)
    join cursor as c on c.subscription = w.subscription and c.lane = w.lane
    join subscription as s on s.id = w.subscription and s.mode = 'stream'
),
head as (
    select l.ordinal, l.subscription, l.lane, 1::bigint as number, first.position, first.key
    from lane as l
    cross join lateral (
        select d.position, d.key
        from delivery as d
        where d.subscription = l.subscription and d.lane = l.lane and not d.queued and d.died_at is not null and d.key is not null
        order by d.key, d.arrival
        limit 1
    ) as first
    where l.blocks
    union all
    select h.ordinal, h.subscription, h.lane, h.number + 1, next.position, next.key
    from head as h
    cross join lateral (
        select d.position, d.key
        from delivery as d
        where d.subscription = h.subscription and d.lane = h.lane and not d.queued and d.died_at is not null and d.key > h.key
        order by d.key, d.arrival
        limit 1
    ) as next
    where h.number <= $3::bigint
),
needed as (
    select l.ordinal, 0::bigint as number, d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since
    from lane as l
    -- Lane by lane, also if the plan was made when there was hardly a row: `offset 0` keeps it from being turned round.
    cross join lateral (
        select *
        from delivery as own
        where own.subscription = l.subscription and own.lane = l.lane and not own.queued and own.died_at is null
        offset 0
    ) as d
    union all
    select l.ordinal, 0::bigint, d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since
    from lane as l
    cross join unnest(l.open) as gap
    -- By position, not by lane: few rows lie there, and any number of dead ones may be a lane's.
    cross join lateral (
        select *
        from delivery as own
        where own.subscription = l.subscription and own.position >= lower(gap)
            and own.position < coalesce(upper(gap), 9223372036854775807)
        offset 0
    ) as d
    where d.lane = l.lane and not d.queued and d.died_at is not null
    union all
    select h.ordinal, h.number, d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since
    from head as h
    join delivery as d on d.subscription = h.subscription and d.position = h.position
)
select n.ordinal, n.position, n.key, n.arrival, n.state, n.attempts, n.due_at, n.since, n.number
from needed as n
order by n.ordinal, n.arrival, n.position
