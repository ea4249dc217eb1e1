-- Queues: their rows in the delivery table, and the claims on them.
--
-- A row may be claimed when all of this is true:
-- 1. It is in line: its state is `pending` or `retrying`, and no instance has a claim on it.
-- 2. It is due: its `due_at` has come.
-- 3. It is its key's turn: of the rows of its key that are `pending`, `retrying` or `processing` it has arrived first, and, where dead
--    events block their key (`on_dead = 'block'`), no dead row of the key arrived before it. A row without a key waits for no other.
-- 4. It is not suspect, or the request takes suspect rows. A row is suspect when it has been recovered as often as `SUSPECT_AFTER`
--    says; one request gets one such row at most.
-- A delayed row is not in line. When it is due it gets a place behind what its key has (the function `place_delayed`). Rows are claimed
-- in the order of `ready_at`.
--
-- `ready_at` finds the candidates. It is set to the time from which a row is due when the row is added as the first of its key, when a
-- claim on it ends and the row stays, or by the function `promote`, which is called for a key after the commit of whatever can give it
-- another first row. It is a hint and decides nothing: the function `claim_deliveries`, which `claim` calls, chooses and locks rows by it and then asks
-- the rule again, in a statement that sees all that was committed before the locks. A row whose hint was wrong loses it, and its key
-- is promoted after the commit. A key that was left out, since whoever should have promoted it has ended, is found by `keys_in_line`.

-- name: claim
-- Claims for instance $1 by the rule above, and puts delayed rows in their places. The first columns are those of an event, as in scan.sql.
select
    c.position, c.topic, c.type, c.id, c.key, c.payload, c.payload_bytes, c.content_type, c.headers, c.stream_version, c.deliver_at,
    c.created_at, c.claim, c.arrival, c.attempts, c.due_at, c.since, c.crashes, c.ready_at
from claim_deliveries(
    $2::bigint, $1::integer, $3::bigint, $4::integer, $5::boolean, $8::integer, $6::timestamptz, $7::boolean, $9::integer,
    $10::integer
) as c

-- name: figures
-- How many rows could be claimed, those included that were delayed and are due; when the next is due; and whether instance $1 has a
-- row.
select
    (
        select count(*)
        from (
            select
            from delivery as d
            where d.subscription = r.subscription and d.ready_at >= r.since and d.ready_at <= statement_timestamp()
                and d.owner is null
            order by d.ready_at
            limit r.counted
        ) as waiting
    ) + (
        select count(*)
        from (
            select
            from delivery as d
            where d.subscription = r.subscription and d.state = 'delayed' and d.due_at <= statement_timestamp()
            order by d.due_at
            limit r.counted
        ) as due
    ) as waiting,
    least(
        (
            select d.ready_at
            from delivery as d
            where d.subscription = r.subscription and d.ready_at > statement_timestamp() and d.owner is null
            order by d.ready_at
            limit 1
        ),
        (
            select d.due_at
            from delivery as d
            where d.subscription = r.subscription and d.state = 'delayed' and d.due_at > statement_timestamp()
            order by d.due_at
            limit 1
        )
    ) as next_due,
    statement_timestamp() as now,
    exists (select from instance as i where i.id = $1::integer) as is_alive
-- Joined, so that the plan is the same whatever is asked for.
from unnest(array[$2::bigint], array[$3::timestamptz], array[$4::bigint]) as r (subscription, since, counted)

-- name: rows
-- How many deliveries of a queue wait for their turn or are worked on. What is dead or delayed waits for nothing of the kind, however
-- much there is of it.
select count(*) from delivery as d where d.subscription = $1 and d.state in ('pending', 'retrying', 'processing')

-- name: keys
-- The next $3 keys above $2 with a row that the owner of their lane must not overtake: what stands in line, what is delayed, and what
-- is dead, which an operator may call back at any time. A few looks at an index for each key.
with recursive k (key, number) as (
    select $2::text, 0
    union all
    select n.key, k.number + 1
    from k
    cross join lateral (
        select least(
            (
                select d.key
                from delivery as d
                where d.subscription = $1::bigint and d.key > k.key and d.state in ('pending', 'retrying', 'processing')
                order by d.key
                limit 1
            ),
            (
                select d.key from delivery as d where d.subscription = $1 and d.key > k.key and d.state = 'delayed'
                order by d.key limit 1
            ),
            (
                select d.key from delivery as d where d.subscription = $1 and d.key > k.key and d.state = 'dead'
                order by d.key limit 1
            )
        )
        -- Keeps it from being computed twice.
        offset 0
    ) as n (key)
    where k.number < $3::integer and n.key is not null
)
select key from k where number > 0 order by number

-- name: keys_dense
-- As `keys`, for keys with few rows each: of at most $3 rows of each kind above the key $2, the keys up to which all kinds were
-- read, and whether there are no more.
with line as (
    select d.key
    from delivery as d
    where d.subscription = $1::bigint and d.key > $2::text and d.state in ('pending', 'retrying', 'processing')
    order by d.key
    limit $3::bigint
),
later as (
    select d.key from delivery as d where d.subscription = $1 and d.key > $2 and d.state = 'delayed' order by d.key limit $3
),
dead as (
    select d.key from delivery as d where d.subscription = $1 and d.key > $2 and d.state = 'dead' order by d.key limit $3
),
-- Null where nothing was left out.
bound as (
    select least(
        (select case when count(*) >= $3 then max(key) end from line),
        (select case when count(*) >= $3 then max(key) end from later),
        (select case when count(*) >= $3 then max(key) end from dead)
    ) as key
)
select u.key, b.key is null as is_all
from (select key from line union all select key from later union all select key from dead) as u
cross join bound as b
where b.key is null or u.key <= b.key
group by u.key, b.key
order by u.key

-- name: keys_in_line
-- The next $3 keys above $2 with a row that stands in line, one look at the index for each.
with recursive k (key, number) as (
    (
        select d.key, 1
        from delivery as d
        where d.subscription = $1::bigint and d.key > $2::text and d.state in ('pending', 'retrying', 'processing')
        order by d.key
        limit 1
    )
    union all
    select n.key, k.number + 1
    from k
    cross join lateral (
        select d.key
        from delivery as d
        where d.subscription = $1 and d.key > k.key and d.state in ('pending', 'retrying', 'processing')
        order by d.key
        limit 1
    ) as n
    where k.number < $3::integer
)
select key from k order by number

-- name: promote
-- Lets the first row of each key be found by claims; of how many it was not known.
select promote($1, $2)

-- name: keys_of_queues
-- The keys of queues with a row that the owner of their lane must not overtake, and whether some are left out, since there are more than $2
-- rows of a kind. All are read once in the order of their keys. Who looks from key to key passes over what others add meanwhile, and this
-- snapshot does not show, again with every key.
select s.id, k.key, k.more
from subscription as s
cross join lateral (
    with line as (
        select d.key
        from delivery as d
        where d.subscription = s.id and d.key > '' and d.state in ('pending', 'retrying', 'processing')
        order by d.key
        limit $2::integer + 1
    ),
    later as (
        select d.key from delivery as d where d.subscription = s.id and d.key > '' and d.state = 'delayed' order by d.key limit $2 + 1
    ),
    dead as (
        select d.key from delivery as d where d.subscription = s.id and d.key > '' and d.state = 'dead' order by d.key limit $2 + 1
    ),
    figures as (
        select (select count(*) from line) > $2 or (select count(*) from later) > $2 or (select count(*) from dead) > $2 as more
    )
    select u.key, f.more
    from (select key from line union all select key from later union all select key from dead) as u
    cross join figures as f
    group by u.key, f.more
) as k
where s.id = any ($1::bigint[]) and s.mode = 'queue'

-- name: put
-- Rows of queues for events that have none yet, in order; the keys of which one is behind others. A key's first row here is ready
-- at once if the key has no other. A row that is worked on already comes before whatever its key has: an operator may have added rows
-- meanwhile. A relay's clock may be ahead of the server's. What the stored cursor has settled had its row before: the owner repeats a
-- settlement that was not answered, and by then its rows may be done.
with added as (
    insert into delivery (
        subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, errors, queued, owner, claim,
        claimed_at, ready_at
    )
    select
        w.subscription, w.position, w.lane,
        coalesce(
            case
                when w.claim is not null and w.key is not null then (
                    select d.arrival
                    from delivery as d
                    where d.subscription = w.subscription and d.key = w.key and d.state in ('pending', 'retrying', 'processing')
                    order by d.arrival
                    limit 1
                ) - cardinality($3) - 1 + w.ordinal
            end,
            nextval('delivery_arrival_seq')
        ),
        w.key, w.state, w.attempts, case w.state when 'pending' then least(w.due_at, clock_timestamp()) else w.due_at end, w.since,
        case w.state when 'dead' then clock_timestamp() end, w.errors, true, case when w.claim is not null then $1::integer end,
        w.claim, case when w.claim is not null then clock_timestamp() end,
        case
            -- What is delayed is found by when it is due.
            when w.claim is not null or w.state in ('dead', 'delayed') then null
            when w.key is null then case w.state when 'pending' then clock_timestamp() else greatest(w.due_at, clock_timestamp()) end
            -- Not as an anti join, which might read all of the table. What is dead may block its key; a promotion looks.
            when w.is_first and (
                select d.position
                from delivery as d
                where d.subscription = w.subscription and d.key = w.key and d.state in ('pending', 'retrying', 'processing')
                order by d.arrival
                limit 1
            ) is null and (
                select d.position
                from delivery as d
                where d.subscription = w.subscription and d.key = w.key and d.state = 'dead'
                order by d.arrival
                limit 1
            ) is null then case w.state when 'pending' then clock_timestamp() else greatest(w.due_at, clock_timestamp()) end
        end
    from (
        select
            n.*,
            row_number() over (partition by n.subscription, n.key, n.state = 'delayed' order by n.ordinal) = 1
                and n.key is not null and n.state <> 'delayed' as is_first
        from unnest($2::bigint[], $3::bigint[], $4::integer[], $5::text[], $6::text[], $7::integer[], $8::timestamptz[],
            $9::timestamptz[], $10::text[], $11::bigint[], $12::bigint[])
            with ordinality
            as n (subscription, position, lane, key, state, attempts, due_at, since, errors, claim, epoch, ordinal)
        join cursor as c on c.subscription = n.subscription and c.lane = n.lane and c.epoch = n.epoch
        where n.position > c.floor and not c.settled @> n.position
        order by n.ordinal
    ) as w
    on conflict (subscription, position) do nothing
    returning subscription, key, state, claim, ready_at
)
select distinct subscription, key
from added
where ready_at is null and claim is null and key is not null and state in ('pending', 'retrying')

-- name: lock_keys
-- Nobody claims anything of the keys of these deliveries until the transaction ends.
select
from (
    select distinct r.position
    from (
        select distinct t.key
        from unnest($2::bigint[]) as w (position)
        cross join lateral (select t.key from delivery as t where t.subscription = $1::bigint and t.position = w.position offset 0) as t
    ) as k
    cross join lateral (
        select l.position
        from delivery as l
        where l.subscription = $1 and l.key = k.key and l.state in ('pending', 'retrying', 'processing')
        union all
        select l.position from delivery as l where l.subscription = $1 and l.key = k.key and l.state = 'delayed'
        union all
        select l.position from delivery as l where l.subscription = $1 and l.key = k.key and l.state = 'dead'
    ) as r
) as r
join delivery as d on d.subscription = $1 and d.position = r.position
where d.queued
order by d.position
for update of d

-- name: end
-- Ends claims of instance $1: `done` deletes, `back` counts no attempt. Which were still its own, and the keys that may have another
-- head now. $9 errors are kept. Written so that each row is looked up by the primary key: the owner is compared in a way that no
-- index serves, and the subscription in one that only a look at the index does. Else some plans compare all ends with all rows.
with ended as (
    select *
    from unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::integer[], $7::timestamptz[], $8::text[])
        with ordinality as e (subscription, position, claim, fate, attempts, due_at, error, ordinal)
), gone as (
    delete from delivery as d
    using ended as e
    where e.fate = 'done' and d.subscription = any (array[e.subscription]) and d.position = e.position
        and d.owner is not distinct from $1::integer and d.claim = e.claim
    returning e.ordinal, d.subscription, d.key
), changed as (
    update delivery as d
    set state = case when e.fate <> 'back' then e.fate when d.attempts > 0 then 'retrying' else 'pending' end,
        attempts = coalesce(e.attempts, d.attempts),
        due_at = coalesce(e.due_at, least(d.due_at, clock_timestamp())),
        ready_at = case when e.fate <> 'dead' then greatest(e.due_at, clock_timestamp()) end,
        died_at = case e.fate when 'dead' then clock_timestamp() end,
        errors = case
            when e.error is null then d.errors
            else (
                select jsonb_agg(kept.error order by kept.number)::text
                from (
                    select a.error, a.number, count(*) over () as count
                    from jsonb_array_elements(d.errors::jsonb || e.error::jsonb) with ordinality as a (error, number)
                ) as kept
                where kept.number > kept.count - $9::bigint
            )
        end,
        owner = null, claim = null, claimed_at = null
    from ended as e
    where e.fate <> 'done' and d.subscription = any (array[e.subscription]) and d.position = e.position
        and d.owner is not distinct from $1 and d.claim = e.claim
    returning e.ordinal, d.subscription, case d.state when 'dead' then d.key end
)
select ordinal, subscription, key from gone
union all
select * from changed

-- name: give_back
-- The claims of an instance that ends by itself go back as if they had never been made.
update delivery
set state = case when attempts > 0 then 'retrying' else 'pending' end, ready_at = greatest(due_at, clock_timestamp()),
    owner = null, claim = null, claimed_at = null
where owner = $1::integer

-- name: is_claimed
select exists (select from delivery where owner is not null and subscription = $1)

-- name: recover_end
-- As `take_end` of cursor.sql, for claims: ends the sessions of instances whose beat has stood still. $3 are what the names end with.
with silent as (
    select i.id
    from unnest($1::integer[], $2::bigint[]) as w (owner, beat)
    join instance as i on i.id = w.owner and i.beat = w.beat
)
select count(pg_terminate_backend(a.pid))
from pg_stat_activity as a
join silent as s on true
join unnest($3::text[]) as n (ending) on a.application_name = 'pillarbox relay ' || s.id || n.ending
where a.datname = current_database()
    and a.pid <> pg_backend_pid()
    and case
        when (select rolsuper from pg_roles where oid = a.usesysid)
            then (select rolsuper from pg_roles where rolname = current_user)
        else pg_has_role(a.usesysid, 'usage') or pg_has_role('pg_signal_backend', 'usage')
    end

-- name: recover_hold
-- Whoever is about to lose claims for his silence cannot beat meanwhile: one that has beaten since lives.
select
from instance
where id = any ($1::integer[])
    or id in (
        select o.owner
        from unnest($2::integer[], $3::bigint[]) as o (owner, silent_ms)
        where o.silent_ms >= (select min(processing_timeout_ms) from subscription where mode = 'queue')
    )
order by id
for share

-- name: recover_wait
-- Who was about to end a claim when he died has ended it after this, or it is left to be recovered. In the order in which everybody locks
-- deliveries; each is looked up by the primary key.
select
from (
    select h.subscription, h.position
    from delivery as h
    where h.owner = any ($1::integer[])
    order by h.subscription, h.position
    offset 0
) as h
cross join lateral (
    select from delivery as d where d.subscription = h.subscription and d.position = h.position
    offset 0
    for update
) as d

-- name: recover
-- Claims of those who will not end them any more. Who ends them at this moment is left alone. First the claims are looked through, by the
-- index of owners (`offset 0`: as a join, some plans read all deliveries); then what is chosen is locked, if it is still the same claim.
-- For how long an owner has been silent ($7) is counted by the clock of the caller, who has seen no other beat: this server's may jump.
with chosen as materialized (
    select h.subscription, h.position, h.owner, h.claim, s.retry, c.cause
    from (select d.subscription, d.position, d.owner, d.claim from delivery as d where d.owner is not null offset 0) as h
    join subscription as s on s.id = h.subscription
    left join instance as i on i.id = h.owner
    left join unnest($1::integer[], $2::text[], $3::bigint[]) as w (owner, cause, beat) on w.owner = h.owner
    left join unnest($5::integer[], $6::bigint[], $7::bigint[]) as o (owner, beat, silent_ms) on o.owner = h.owner
    cross join lateral (
        select case
            when w.cause = 'lease' and i.beat <> w.beat then null
            when w.cause is not null then w.cause
            when not $4::boolean then null
            when i.id is null then 'crash'
            when i.beat = o.beat and o.silent_ms >= s.processing_timeout_ms then 'timeout'
        end
    ) as c (cause)
    where c.cause is not null
)
select d.subscription, d.position, d.key, d.attempts, d.due_at, d.since, d.errors, c.retry, c.cause, clock_timestamp() as now
from chosen as c
cross join lateral (
    select * from delivery as r where r.subscription = c.subscription and r.position = c.position
    offset 0
    for update skip locked
) as d
where d.owner = c.owner and d.claim = c.claim

-- name: recover_by_operator
-- Claims that an operator takes: of subscription $1, of instance $2, of owners that have been silent for $3 milliseconds; null and 0:
-- whichever.
select d.subscription, d.position, d.key, d.attempts, d.due_at, d.since, d.errors, s.retry, 'operator' as cause, clock_timestamp() as now
from delivery as d
join subscription as s on s.id = d.subscription
left join instance as i on i.id = d.owner
where d.owner is not null and ($1::bigint is null or d.subscription = $1) and ($2::bigint is null or d.owner = $2)
    and ($3::bigint = 0 or i.id is null or i.beat_at < clock_timestamp() - interval '1 millisecond' * $3)
order by d.subscription, d.position
for update of d

-- name: take_back
-- Each is looked up by the primary key, as `end` says.
update delivery as d
set state = w.state, attempts = w.attempts, due_at = w.due_at, errors = w.errors, crashes = d.crashes + 1,
    ready_at = case when w.state <> 'dead' then greatest(w.due_at, clock_timestamp()) end,
    died_at = case w.state when 'dead' then clock_timestamp() end,
    owner = null, claim = null, claimed_at = null
from unnest($1::bigint[], $2::bigint[], $3::text[], $4::integer[], $5::timestamptz[], $6::text[])
    as w (subscription, position, state, attempts, due_at, errors)
where d.subscription = any (array[w.subscription]) and d.position = w.position

-- name: note_sweep
-- Not waited for: retention may have it for a while, and the next look is not far.
update meta
set recovery_at = clock_timestamp()
where one in (select one from meta for update skip locked)

-- name: count_recovered
insert into recovery as r (subscription, cause, count, last_at)
select w.subscription, w.cause, w.count, clock_timestamp()
from unnest($1::bigint[], $2::text[], $3::bigint[]) as w (subscription, cause, count)
order by w.subscription, w.cause
on conflict (subscription, cause) do update set count = r.count + excluded.count, last_at = excluded.last_at

-- name: recovered
select subscription, cause, count, last_at
from recovery
order by subscription, cause
