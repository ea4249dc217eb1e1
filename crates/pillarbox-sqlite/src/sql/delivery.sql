-- The delivery table as streams and operators use it. What queues do with it is in queue.sql.

-- name: load
-- What the owner of a lane needs: what is not dead; what is dead and is not settled, since its range was left out (in the gaps ?3); and where dead events hold their key back
-- (?4), the first dead one of each key, found key by key. One key more than ?5 says that there are more.
with recursive head (number, key) as (
    select 1, min(key)
    from pillarbox_delivery indexed by pillarbox_delivery_dead
    where subscription = ?1 and lane = ?2 and died_at is not null and key is not null and ?4
    union all
    select
        head.number + 1,
        (
            select min(d.key)
            from pillarbox_delivery as d indexed by pillarbox_delivery_dead
            where d.subscription = ?1 and d.lane = ?2 and d.died_at is not null and d.key is not null and d.key > head.key
        )
    from head
    where head.key is not null and head.number <= ?5
)
select position, key, arrival, state, attempts, due_at, since, 0 as number
from pillarbox_delivery indexed by pillarbox_delivery_alive
where subscription = ?1 and lane = ?2 and died_at is null
union all
select d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since, 0
from json_each(?3) as gap
-- By position, not by lane: few rows lie there, and any number of dead ones may be a lane's.
cross join pillarbox_delivery as d
    on d.subscription = ?1 and d.position between json_extract(gap.value, '$[0]') and json_extract(gap.value, '$[1]')
where +d.lane = ?2 and d.died_at is not null
union all
select d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since, head.number
from head
join pillarbox_delivery as d on d.subscription = ?1 and d.position = (
    select first.position
    from pillarbox_delivery as first indexed by pillarbox_delivery_dead
    where first.subscription = ?1 and first.lane = ?2 and first.died_at is not null and first.key is not null
        and first.key = head.key
    order by first.arrival
    limit 1
)
where head.key is not null
order by arrival, position

-- name: max_arrival
select max(arrival) from pillarbox_delivery where subscription = ?1 and lane = ?2

-- name: last_arrival
select coalesce(max(arrival), 0) from pillarbox_delivery where subscription = ?1 and lane = ?2

-- name: put
insert into pillarbox_delivery (
    subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, errors
)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, case ?6 when 'dead' then ?10 end, '[]')
on conflict (subscription, position) do update set
    lane = excluded.lane, arrival = excluded.arrival, key = excluded.key, state = excluded.state,
    attempts = excluded.attempts, due_at = excluded.due_at, since = excluded.since,
    died_at = excluded.died_at, errors = excluded.errors
where ?11

-- name: change
update pillarbox_delivery
set arrival = ?3, state = ?4, attempts = ?5, due_at = ?6, since = ?7,
    died_at = case ?4 when 'dead' then coalesce(died_at, ?8) end
where subscription = ?1 and position = ?2

-- name: errors
select errors from pillarbox_delivery where subscription = ?1 and position = ?2

-- name: set_errors
update pillarbox_delivery set errors = ?3 where subscription = ?1 and position = ?2

-- name: remove
delete from pillarbox_delivery where subscription = ?1 and position = ?2

-- name: list
-- Deliveries of subscription ?1 in log order. What is chosen gives the positions that are looked at, by the index that serves.
select
    d.position, coalesce(e.topic, k.topic) as topic, coalesce(e.type, k.type) as type, d.key,
    coalesce(e.deliver_at, k.deliver_at) as deliver_at, coalesce(e.created_at, k.created_at, d.since) as created_at,
    coalesce(e.id, k.id) as id, coalesce(e.headers, k.headers, '{}') as headers,
    d.state, d.attempts, d.due_at, d.errors, d.owner, d.claimed_at, i.beat_at
from (@rows@) as chosen
cross join pillarbox_delivery_state as d on d.subscription = ?1 and d.position = chosen.position
left join pillarbox_event as e on e.position = d.position
left join pillarbox_event_kept as k on k.position = d.position
left join pillarbox_instance as i on i.id = d.owner
where (?2 is null or d.state = ?2) and (?3 is null or d.key = ?3)
order by chosen.position

-- name: rows_of_key
select position from pillarbox_delivery indexed by pillarbox_delivery_key where subscription = ?1 and key = ?3

-- name: rows_dead
select position
from pillarbox_delivery indexed by pillarbox_delivery_by_state
where subscription = ?1
    and state = 'dead'

-- name: rows_delayed
select position
from pillarbox_delivery indexed by pillarbox_delivery_by_state
where subscription = ?1
    and state = 'delayed'

-- name: rows_in_line
select position
from pillarbox_delivery indexed by pillarbox_delivery_by_state
where subscription = ?1
    and state in ('pending', 'processing', 'retrying')

-- name: rows_in_line_or_due
select position
from pillarbox_delivery indexed by pillarbox_delivery_by_state
where subscription = ?1
    and state in ('pending', 'processing', 'retrying')
union all select position
from pillarbox_delivery indexed by pillarbox_delivery_delayed
where subscription = ?1
    and state = 'delayed'
    and due_at <= cast((julianday('now') - 2440587.5) * 86400000 + 0.5 as integer)

-- name: rows_all
select position from pillarbox_delivery where subscription = ?1

-- name: show
select d.state, d.attempts, d.due_at, d.since, d.errors, d.owner, d.claimed_at, i.beat_at
from pillarbox_delivery_state as d
left join pillarbox_instance as i on i.id = d.owner
where d.subscription = ?1 and d.position = ?2

-- name: head
select coalesce(e.id, k.id) as id, head.position, head.state
from pillarbox_delivery as d
join pillarbox_subscription as s on s.id = d.subscription
join pillarbox_delivery as head
    on head.subscription = d.subscription and head.key = d.key and head.arrival < d.arrival
left join pillarbox_event as e on e.position = head.position
left join pillarbox_event_kept as k on k.position = head.position
where d.subscription = ?1 and d.position = ?2
    and head.state <> 'delayed' and (head.state <> 'dead' or s.on_dead = 'block')
order by head.arrival
limit 1

-- name: figures
-- How many deliveries there are in each state; what is said of a state twice adds up. What is dead or delayed is not counted here but as
-- it comes and goes; what was delayed and is due by ?1 is pending. Which index serves is said: SQLite prefers the primary key, and with it
-- every row.
select d.subscription, d.state, count(*) as count
from pillarbox_subscription as s
cross join pillarbox_delivery as line indexed by pillarbox_delivery_by_state
    on line.subscription = s.id and line.state in ('pending', 'processing', 'retrying')
cross join pillarbox_delivery_state as d on d.subscription = line.subscription and d.position = line.position
group by d.subscription, d.state
union all
select subscription, state, count from pillarbox_aside_count
union all
select subscription, 'delayed', -count(*)
from pillarbox_delivery
where subscription in (select id from pillarbox_subscription) and state = 'delayed' and due_at <= ?1
group by subscription
union all
select subscription, 'pending', count(*)
from pillarbox_delivery
where subscription in (select id from pillarbox_subscription) and state = 'delayed' and due_at <= ?1
group by subscription

-- name: oldest
-- Of each subscription: since when its oldest delivery waits that is not dead, and when the one that has been due for longest was. The
-- oldest is the lowest in the log; one that was delayed counts from when it became due, by ?1. What is dead is not looked at, nor what is
-- not due.
select
    s.id,
    case
        when l.position is not null then coalesce(
            (select max(created_at, coalesce(deliver_at, created_at)) from pillarbox_event where position = l.position),
            (select max(created_at, coalesce(deliver_at, created_at)) from pillarbox_event_kept where position = l.position),
            (select since from pillarbox_delivery where subscription = s.id and position = l.position)
        )
    end as oldest,
    l.due_at,
    (
        select min(due_at) from pillarbox_delivery where subscription = s.id and state = 'delayed' and due_at <= ?1
    ) as delayed_due_at
from pillarbox_subscription as s
left join (
    select
        subscription, min(position) as position,
        min(case when state = 'retrying' then due_at end) as due_at
    from pillarbox_delivery indexed by pillarbox_delivery_by_state
    where subscription in (select id from pillarbox_subscription) and state in ('pending', 'processing', 'retrying')
    group by subscription
) as l on l.subscription = s.id

-- name: targets
-- Deliveries of the positions ?2 in whatever state; or what is dead, of the key ?3 or all of it. In log order, by the index that serves.
select d.position, d.lane, coalesce(e.id, k.id) as id, d.key
from (
    select * from (
        select position, lane, key
        from pillarbox_delivery
        where ?2 is not null and subscription = ?1 and position in (select value from json_each(?2))
    )
    union all
    select * from (
        select position, lane, key
        from pillarbox_delivery indexed by pillarbox_delivery_key
        where ?2 is null and ?3 is not null and subscription = ?1 and key = ?3 and state = 'dead'
    )
    union all
    select * from (
        select position, lane, key
        from pillarbox_delivery indexed by pillarbox_delivery_by_state
        where ?2 is null and ?3 is null and subscription = ?1 and state = 'dead'
        order by position
        limit ?4
    )
) as d
left join pillarbox_event as e on e.position = d.position
left join pillarbox_event_kept as k on k.position = d.position
order by d.position
limit ?4

-- name: requeue
-- Whoever works on it has lost it.
update pillarbox_delivery
set state = 'pending', attempts = 0, due_at = ?3, died_at = null, owner = null, claim = null, claimed_at = null, ready_at = null
where subscription = ?1 and position = ?2

-- name: rewind
delete from pillarbox_delivery
where subscription = ?1 and position > ?2
    and exists (select 1 from pillarbox_event as e where e.position = pillarbox_delivery.position)

-- name: rewind_kept
-- From the copies on, of which few lie above a place that is in the log.
select d.position, d.lane, k.id, d.key
from pillarbox_event_kept as k
cross join pillarbox_delivery as d on d.subscription = ?1 and d.position = k.position
where k.position > ?2 and (?3 is null or d.key = ?3) and d.state <> 'delayed'
    and not exists (select 1 from pillarbox_event as e where e.position = d.position)
order by d.position

-- name: rewind_key
-- What is not to be delivered yet waits for its time.
insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
select
    ?1, e.position, ?3, ?4, ?5, case when e.deliver_at > ?6 then 'delayed' else 'pending' end, 0,
    max(coalesce(e.deliver_at, ?6), ?6), ?6
from pillarbox_event as e
where e.position = ?2
on conflict (subscription, position) do update set
    arrival = excluded.arrival, state = excluded.state, attempts = 0, due_at = excluded.due_at, died_at = null,
    owner = null, claim = null, claimed_at = null, ready_at = null
where state <> 'delayed'

-- name: put_risen
insert or ignore into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
values (
    ?1, ?2, ?3,
    (select coalesce(max(arrival), 0) + 1 from pillarbox_delivery where subscription = ?1 and lane = ?3),
    ?4, ?5, 0, ?6, ?7
)

-- name: ranges
select position as low, position as high from pillarbox_delivery where subscription = ?1 and lane = ?2 order by 1

-- name: ranges_within
select position as low, position as high
from pillarbox_delivery
where subscription = ?1
    and lane = ?2
    and position > ?3
    and position <= ?4

-- name: in_order_of_arrival
select position, key from pillarbox_delivery where subscription = ?1 order by arrival, lane, position

-- name: relane
update pillarbox_delivery set lane = ?3, arrival = ?4 where subscription = ?1 and position = ?2
