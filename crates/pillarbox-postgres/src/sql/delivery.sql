-- The delivery table as streams and operators use it. What queues do with it is in queue.sql.
--
-- Where rows of the table are looked up by the primary key, the subscription is compared in a way that only a look at that index does
-- (`= any (array[…])`). Otherwise some plans compare all that is asked for with all rows.

-- name: load
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

-- name: last_arrival
select coalesce(max(arrival), 0) from delivery where subscription = $1 and lane = $2 and not queued

-- name: put
-- For lanes of which no operator has changed a delivery since they were loaded.
insert into delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, errors, died_at)
select
    w.subscription, w.position, w.lane, w.arrival, w.key, w.state, w.attempts, w.due_at, w.since, w.errors,
    case w.state when 'dead' then clock_timestamp() end
from unnest($1::bigint[], $2::bigint[], $3::integer[], $4::bigint[], $5::text[], $6::text[], $7::integer[],
    $8::timestamptz[], $9::timestamptz[], $10::text[], $11::bigint[], $12::bigint[])
    as w (subscription, position, lane, arrival, key, state, attempts, due_at, since, errors, epoch, revision)
join cursor as c
    on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch and c.revision = w.revision
on conflict (subscription, position) do update set
    lane = excluded.lane, arrival = excluded.arrival, key = excluded.key, state = excluded.state,
    attempts = excluded.attempts, due_at = excluded.due_at, since = excluded.since,
    died_at = excluded.died_at, errors = excluded.errors

-- name: add
-- As `put`, where an operator's word is newer than what is there. What the stored cursor has settled was put before, by a
-- settlement that was not answered: the operator may have given it up since.
insert into delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, errors, died_at)
select
    w.subscription, w.position, w.lane, w.arrival, w.key, w.state, w.attempts, w.due_at, w.since, w.errors,
    case w.state when 'dead' then clock_timestamp() end
from unnest($1::bigint[], $2::bigint[], $3::integer[], $4::bigint[], $5::text[], $6::text[], $7::integer[],
    $8::timestamptz[], $9::timestamptz[], $10::text[], $11::bigint[], $12::bigint[])
    as w (subscription, position, lane, arrival, key, state, attempts, due_at, since, errors, epoch, revision)
join cursor as c
    on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch and c.revision <> w.revision
where w.position > c.floor and not c.settled @> w.position
on conflict (subscription, position) do nothing

-- name: change
-- Deliveries that are still there: an operator may have skipped one. $12 errors are kept.
update delivery as d
set arrival = w.arrival, state = w.state, attempts = w.attempts, due_at = w.due_at, since = w.since,
    died_at = case w.state when 'dead' then coalesce(d.died_at, clock_timestamp()) end,
    errors = case
        when w.errors is null then d.errors
        else (
            select jsonb_agg(kept.error order by kept.number)::text
            from (
                select a.error, a.number, count(*) over () as count
                from jsonb_array_elements(d.errors::jsonb || w.errors::jsonb) with ordinality as a (error, number)
            ) as kept
            where kept.number > kept.count - $12::bigint
        )
    end
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[], $8::integer[],
    $9::timestamptz[], $10::timestamptz[], $11::text[])
    as w (subscription, lane, epoch, revision, position, arrival, state, attempts, due_at, since, errors)
join cursor as c
    on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch and c.revision = w.revision
where d.subscription = any (array[w.subscription]) and d.position = w.position

-- name: finish
delete from delivery as d
using unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[]) as w (subscription, lane, epoch, position)
join cursor as c on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch
where d.subscription = any (array[w.subscription]) and d.position = w.position

-- name: remove
delete from delivery where subscription = $1 and position = $2 returning case when queued then key end

-- name: list
-- Deliveries of subscription $1 in log order. @rows@ says which are looked at, so that an index serves, and $8 how many.
select
    d.position, coalesce(e.topic, k.topic, '') as topic, coalesce(e.type, k.type, '') as type, d.key,
    coalesce(e.deliver_at, k.deliver_at) as deliver_at, coalesce(e.created_at, k.created_at, d.since) as created_at,
    coalesce(e.id, k.id, event_id(e.position, e.created_at)) as id, d.state, d.attempts, d.due_at, d.errors, d.owner,
    d.claimed_at, i.beat_at
from (
    -- Of the table alone: a join would lose the order of the index.
    select d.position from delivery as d where d.subscription = $1::bigint @rows@ order by d.position limit $8::bigint
) as chosen
cross join lateral (
    select v.* from delivery_state as v where v.subscription = $1 and v.position = chosen.position offset 0
) as d
left join event as e on e.position = d.position
left join event_kept as k on k.position = d.position
left join instance as i on i.id = d.owner
where ($2::text is null or d.state = $2) and ($3::text is null or d.key = $3)
    and ($4::text is null or coalesce(e.topic, k.topic) = $4)
    and ($5::text is null or starts_with(coalesce(e.topic, k.topic), $5))
    and ($6::text is null or coalesce(e.headers, k.headers) ->> 'correlationid' = $6)
-- Which have this order: as soon as enough are found, no more are looked at.
order by chosen.position
limit $7::bigint

-- name: rows_with_key
-- This and the conditions up to `rows_in_line_or_due` stand in the place of @rows@ in `list`.
and d.key = $3

-- name: rows_dead
and d.state = 'dead'

-- name: rows_delayed
and d.state = 'delayed' and d.due_at > clock_timestamp()

-- name: rows_in_line
and d.state in ('pending', 'retrying', 'processing')

-- name: rows_of_key
and (
    d.key = $3 and d.state = 'dead' or d.key = $3 and d.state = 'delayed'
    or d.key = $3 and d.state in ('pending', 'retrying', 'processing')
)

-- name: rows_in_line_or_due
and d.position = any (array(
    select p.position
    from delivery as p
    where p.subscription = $1 and p.state in ('pending', 'retrying', 'processing')
    union all
    select p.position
    from delivery as p
    where p.subscription = $1 and p.state = 'delayed' and p.due_at <= clock_timestamp()
))

-- name: show
select d.state, d.attempts, d.due_at, d.since, d.errors, d.owner, d.claimed_at, i.beat_at
from delivery_state as d
left join instance as i on i.id = d.owner
where d.subscription = $1::bigint and d.position = $2::bigint

-- name: head
-- The first delivery of the same key that another one waits for.
select coalesce(e.id, k.id, event_id(e.position, e.created_at)) as id, head.position, head.state
from delivery as d
join subscription as s on s.id = d.subscription
cross join lateral (
    (
        select h.position, h.state, h.arrival
        from delivery as h
        where h.subscription = d.subscription and h.key = d.key and h.arrival < d.arrival
            and h.state in ('pending', 'retrying', 'processing')
        order by h.arrival
        limit 1
    )
    union all
    (
        select h.position, h.state, h.arrival
        from delivery as h
        where h.subscription = d.subscription and h.key = d.key and h.arrival < d.arrival and h.state = 'dead'
            and s.on_dead = 'block'
        order by h.arrival
        limit 1
    )
) as head
left join event as e on e.position = head.position
left join event_kept as k on k.position = head.position
where d.subscription = $1::bigint and d.position = $2::bigint
order by head.arrival
limit 1

-- name: figures
-- How many deliveries there are in each state; what is said of a state twice adds up. What is dead or delayed is not counted here but as
-- it comes and goes; what was delayed and is due is pending.
with due as (
    select s.id, (
        select count(*) from delivery as d where d.subscription = s.id and d.state = 'delayed' and d.due_at <= statement_timestamp()
    ) as count
    from subscription as s
)
select subscription, state, count(*) as count
from delivery_state
where stored in ('pending', 'retrying', 'processing')
group by subscription, state
union all
select subscription, state, sum(change)::bigint
from aside_count
group by subscription, state
union all
select id, 'delayed', -count from due where count > 0
union all
select id, 'pending', count from due where count > 0

-- name: oldest
-- Of each subscription: since when its oldest delivery waits that is not dead, when the one that has been due for longest was, and since
-- when the longest claim is held. The oldest is the lowest in the log; one that was delayed counts from when it became due. What is dead
-- is not looked at, nor what is not due.
with in_line as (
    select d.subscription, min(d.position) as position, min(d.due_at) filter (where d.state = 'retrying') as due_at
    from delivery as d
    where d.state in ('pending', 'retrying', 'processing')
    group by d.subscription
), claimed as (
    select d.subscription, min(d.claimed_at) as since from delivery as d where d.owner is not null group by d.subscription
)
select
    s.id,
    least(
        case when l.position is not null then coalesce(
            (select greatest(e.created_at, e.deliver_at) from event as e where e.position = l.position),
            (select greatest(k.created_at, k.deliver_at) from event_kept as k where k.position = l.position),
            (select d.since from delivery as d where d.subscription = s.id and d.position = l.position)
        ) end,
        due.due_at
    ) as oldest,
    least(l.due_at, due.due_at) as oldest_due,
    c.since as processing_since
from subscription as s
left join in_line as l on l.subscription = s.id
left join claimed as c on c.subscription = s.id
left join lateral (
    select d.due_at
    from delivery as d
    where d.subscription = s.id and d.state = 'delayed' and d.due_at <= statement_timestamp()
    order by d.due_at
    limit 1
) as due on true
where l.subscription is not null or c.subscription is not null or due.due_at is not null

-- name: targets
-- Deliveries of the positions $2 in whatever state; or what is dead, of the key $3 or all of it. In log order, by the index that serves.
select d.position, d.lane, coalesce(e.id, k.id, event_id(e.position, e.created_at)) as id, d.key
from (
    (
        select t.position, t.lane, t.key
        from delivery as t
        where t.subscription = $1::bigint and t.position = any($2::bigint[])
    )
    union all
    (
        select t.position, t.lane, t.key
        from delivery as t
        where $2 is null and $3::text is not null and t.subscription = $1 and t.key = $3 and t.state = 'dead'
    )
    union all
    (
        select t.position, t.lane, t.key
        from delivery as t
        where $2 is null and $3 is null and t.subscription = $1 and t.state = 'dead'
        order by t.position
        limit $4::bigint
    )
) as d
left join event as e on e.position = d.position
left join event_kept as k on k.position = d.position
order by d.position
limit $4

-- name: requeue
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

-- name: rewind
delete from delivery as d
where d.subscription = $1::bigint and d.position > $2::bigint and not d.position <@ $3::text::int8multirange
    -- Not as a semi join, which might read all of the log.
    and (select e.position from event as e where e.position = d.position limit 1) is not null
returning case when d.queued then d.key end

-- name: rewind_kept
-- Deliveries whose events are only kept aside: what is read again does not have these. Above $2; of one key, or of all.
select d.position, d.lane, k.id, d.key
from delivery as d
join event_kept as k on k.position = d.position
where d.subscription = $1::bigint and d.position > $2::bigint and ($3::text is null or d.key = $3) and d.state <> 'delayed'
    -- Not as an anti join, which might read all of the log.
    and (select e.position from event as e where e.position = d.position limit 1) is null
order by d.position

-- name: rewind_key
-- $6: it is a queue. What is not to be delivered yet waits for its time. Each event is looked up by its position, also where the planner knows
-- little of the log.
insert into delivery as d (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
select
    $1::bigint, r.position, $3::integer, case when $6::boolean then nextval('delivery_arrival_seq') else $4::bigint + r.number end,
    $5::text, case when e.deliver_at > clock_timestamp() then 'delayed' else 'pending' end, 0,
    greatest(e.deliver_at, clock_timestamp()), clock_timestamp(), $6
from unnest($2::bigint[]) with ordinality as r (position, number)
cross join lateral (select deliver_at from event where event.position = r.position offset 0) as e
on conflict (subscription, position) do update set
    arrival = excluded.arrival, state = excluded.state, attempts = 0, due_at = excluded.due_at, died_at = null, owner = null,
    claim = null, claimed_at = null, ready_at = null
where d.state <> 'delayed'

-- name: put_risen
-- $7: it is a queue.
insert into delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued, ready_at)
values (
    $1::bigint, $2::bigint, $3::integer,
    case
        when $7::boolean then nextval('delivery_arrival_seq')
        else (select coalesce(max(arrival), 0) + 1 from delivery where subscription = $1 and lane = $3 and not queued)
    end,
    $4::text, $5::text, 0, $6::timestamptz, clock_timestamp(), $7,
    case when $7 and $4 is null and $5 <> 'delayed' then $6 end
)
on conflict (subscription, position) do nothing

-- name: ranges
select subscription, lane, position as low, position as high from delivery order by position

-- name: positions_within
select position from delivery where subscription = $1 and lane = $2 and position > $3 and position <= $4

-- name: positions_of
select position from delivery where subscription = $1 and position > $2 and position <= $3

-- name: in_order_of_arrival
select position, key from delivery where subscription = $1 order by arrival, lane, position

-- name: relane
update delivery as d
set lane = n.lane, arrival = case when d.queued then d.arrival else n.arrival end
from unnest($2::bigint[], $3::integer[]) with ordinality as n (position, lane, arrival)
where d.subscription = $1
    and d.position = n.position
