-- Queues: their rows in the delivery table, and the claims on them.
--
-- A row may be claimed when all of this is true:
-- 1. It is in line: its state is `pending` or `retrying`, and no instance has a claim on it.
-- 2. It is due: its `due_at` has come.
-- 3. It is its key's turn: no row of the key is `processing`, none that is in line arrived before it, and, where dead events block
--    their key (`on_dead = 'block'`), no dead one did. A row without a key waits for no other.
-- 4. It is not suspect, or the request takes suspect rows. A row is suspect when it has been recovered as often as `SUSPECT_AFTER`
--    says; one request gets one such row at most.
-- A delayed row is not in line. When it is due it gets a place behind all rows of its lane, and with it of its key (`place`).
-- Rows are claimed in the order of `ready_at`, then of their positions.
--
-- `ready_at` finds the candidates. `promote` sets it when it becomes the row's turn, to a time at which the row is due. That is asked
-- after each change that can make it a row's turn, in the same transaction. `ready_at` is never before `due_at`, and whose turn it is
-- it does not decide: `claimable` asks the rule again.

-- name: is_ready
-- Whether there may be something to claim.
select 1 from pillarbox_delivery where subscription = ?1 and ready_at <= ?2

-- name: is_due
-- Whether a delayed row has to be put in its place.
select 1 from pillarbox_delivery where subscription = ?1 and state = 'delayed' and due_at <= ?2

-- name: due
-- Delayed rows that are due.
select position, key, lane, due_at
from pillarbox_delivery
where subscription = ?1 and state = 'delayed' and due_at <= ?2
order by due_at, position
limit ?3

-- name: place
-- A delayed one that is due stands behind what its key has.
update pillarbox_delivery
set state = 'pending',
    arrival = (select max(arrival) + 1 from pillarbox_delivery where subscription = ?1 and lane = ?3)
where subscription = ?1 and position = ?2

-- name: claimable
-- What may be claimed: the whole rule but for the number of suspect rows.
select d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since, d.crashes
from pillarbox_delivery as d
join pillarbox_subscription as s on s.id = d.subscription
where d.subscription = ?1 and d.ready_at <= ?2 and (d.crashes < ?3 or ?4)
    and d.owner is null and d.state in ('pending', 'retrying')
    and not exists (
        select 1
        from pillarbox_delivery as other
        where other.subscription = d.subscription and other.key = d.key and other.state = 'processing'
    )
    and not exists (
        select 1
        from pillarbox_delivery as other
        where other.subscription = d.subscription and other.key = d.key
            and other.state in ('pending', 'retrying') and other.arrival < d.arrival
    )
    and not exists (
        select 1
        from pillarbox_delivery as other
        where other.subscription = d.subscription and other.key = d.key
            and other.state = 'dead' and other.arrival < d.arrival and s.on_dead = 'block'
    )
order by d.ready_at, d.position

-- name: claim
update pillarbox_delivery
set state = 'processing', owner = ?3, claim = ?4, claimed_at = ?5, ready_at = null
where subscription = ?1 and position = ?2

-- name: claimed_before
-- What this instance has claimed under these numbers already: a request is repeated when its answer was lost.
select position, key, arrival, state, attempts, due_at, since, crashes, claim
from pillarbox_delivery
where owner = ?1 and subscription = ?2 and claim >= ?3 and claim < ?4
order by claim

-- name: waiting
-- How many rows may be claimed now, counted up to ?3.
select count(*)
from (
    select 1
    from pillarbox_delivery
    where subscription = ?1 and ready_at <= ?2
    limit ?3
)

-- name: next_due
-- When there is something to claim next.
select min(due_at)
from (
    select min(ready_at) as due_at from pillarbox_delivery where subscription = ?1 and ready_at > ?2
    union all
    select min(due_at) from pillarbox_delivery where subscription = ?1 and state = 'delayed'
)

-- name: keys
-- The next keys above ?2 with a row. Goes from key to key, however many rows each has.
with recursive known (key) as (
    select min(key) from pillarbox_delivery where subscription = ?1 and key > ?2
    union all
    select (select min(key) from pillarbox_delivery where subscription = ?1 and key > known.key)
    from known
    where known.key is not null
)
select key
from known
where key is not null
limit ?3

-- name: rows
-- How many rows wait for their turn or are worked on.
select count(*) from pillarbox_delivery where subscription = ?1 and state in ('pending', 'retrying', 'processing')

-- name: put
-- It is ready if nothing of its key stands before it.
insert into pillarbox_delivery (
    subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, errors, owner, claim, claimed_at, ready_at
)
values (
    ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, case ?6 when 'dead' then ?10 end, ?11, ?12, ?13, case when ?12 is not null then ?10 end,
    case
        when ?6 in ('pending', 'retrying')
            and not exists (
                select 1
                from pillarbox_delivery
                where subscription = ?1 and key = ?5 and state in ('pending', 'processing', 'retrying')
            )
            and not exists (
                select 1
                from pillarbox_delivery as dead
                join pillarbox_subscription as s on s.id = dead.subscription
                where dead.subscription = ?1 and dead.key = ?5 and dead.state = 'dead' and s.on_dead = 'block'
            )
            then max(?8, ?10)
    end
)
on conflict (subscription, position) do nothing
returning ready_at

-- name: promote
-- Nothing changes while somebody works on one of the key, or a dead one blocks it.
update pillarbox_delivery
set ready_at = max(due_at, ?3)
where subscription = ?1 and ready_at is null
    and position = (
        select position
        from (
            select position, arrival from (
                select position, arrival
                from pillarbox_delivery
                where subscription = ?1 and key = ?2 and state = 'pending'
                order by arrival
                limit 1
            )
            union all
            select position, arrival from (
                select position, arrival
                from pillarbox_delivery
                where subscription = ?1 and key = ?2 and state = 'retrying'
                order by arrival
                limit 1
            )
        )
        order by arrival
        limit 1
    )
    and not exists (
        select 1 from pillarbox_delivery where subscription = ?1 and key = ?2 and state = 'processing'
    )
    and not exists (
        select 1
        from pillarbox_delivery as dead
        join pillarbox_subscription as s on s.id = dead.subscription
        where dead.subscription = ?1 and dead.key = ?2 and dead.state = 'dead' and s.on_dead = 'block'
            and dead.arrival < pillarbox_delivery.arrival
    )

-- name: promote_unkeyed
-- Without a key, it is always the row's turn.
update pillarbox_delivery
set ready_at = max(due_at, ?3)
where subscription = ?1 and position = ?2 and ready_at is null and state in ('pending', 'retrying')

-- name: unready
-- It may be another row's turn now; `promote` asks.
update pillarbox_delivery indexed by pillarbox_delivery_key
set ready_at = null
where subscription = ?1 and key = ?2 and ready_at is not null

-- name: delivery_of_each_key
-- One delivery of each key, and every one without.
select min(position) as position, key
from pillarbox_delivery
where subscription = ?1 and key is not null
group by key
union all
select position, null
from pillarbox_delivery
where subscription = ?1 and key is null

-- name: end_done
-- The event was handled.
delete from pillarbox_delivery
where subscription = ?1 and position = ?2 and owner = ?3 and claim = ?4
returning key

-- name: end_back
-- The claim goes back as if it had never been made.
update pillarbox_delivery
set state = case when attempts > 0 then 'retrying' else 'pending' end, due_at = min(due_at, ?5),
    owner = null, claim = null, claimed_at = null
where subscription = ?1 and position = ?2 and owner = ?3 and claim = ?4
returning key

-- name: end_failed
-- An attempt failed: the row is retried later or is dead.
update pillarbox_delivery
set state = ?5, attempts = ?6, due_at = ?7, died_at = case ?5 when 'dead' then ?8 end,
    owner = null, claim = null, claimed_at = null
where subscription = ?1 and position = ?2 and owner = ?3 and claim = ?4
returning key

-- name: claims_of
-- The claims of one instance.
select subscription, position, claim
from pillarbox_delivery
where owner = ?1
order by subscription, arrival

-- name: held
-- All claims, with what is known of their owners.
select
    d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since, d.subscription, d.owner, d.claim,
    s.retry, s.processing_timeout_ms, i.beat, i.beat_at
from pillarbox_delivery as d indexed by pillarbox_delivery_owner
join pillarbox_subscription as s on s.id = d.subscription
left join pillarbox_instance as i on i.id = d.owner
where d.owner is not null
order by d.subscription, d.arrival

-- name: is_claimed
select 1 from pillarbox_delivery indexed by pillarbox_delivery_owner where owner is not null and subscription = ?1

-- name: count_crash
-- One recovery more; see `suspect` above.
update pillarbox_delivery set crashes = crashes + 1 where subscription = ?1 and position = ?2

-- name: processing_since
select subscription, min(claimed_at) as since
from pillarbox_delivery indexed by pillarbox_delivery_owner
where owner is not null
group by subscription

-- name: count_recovered
insert into pillarbox_recovery (subscription, cause, count, last_at) values (?1, ?2, ?3, ?4)
on conflict (subscription, cause) do update set count = count + excluded.count, last_at = excluded.last_at

-- name: recovered
select subscription, cause, count, last_at
from pillarbox_recovery
order by subscription, cause
