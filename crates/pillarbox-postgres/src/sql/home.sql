-- Where a log is, and what happens to all of it when it is adopted, declared fresh or reset.

-- name: here
-- Where this session is. Nothing but the system identifier, which not everybody may read; see `system_identifier`.
select
    current_database()::text as database,
    (select d.oid::bigint from pg_database as d where d.datname = current_database()) as database_oid,
    'event'::regclass::oid::bigint as event_oid,
    -- The control file still names the old timeline for a while after a promotion; the name of the WAL file does not.
    case
        when not pg_is_in_recovery()
        then ('x' || substring(pg_walfile_name(pg_current_wal_lsn()) from 1 for 8))::bit(32)::integer
    end as timeline,
    -- Every host calls itself by these, and a copy on another one does too.
    case when not inet_server_addr() <<= '127.0.0.0/8' and inet_server_addr() <> '::1' then host(inet_server_addr()) end as address,
    current_setting('port')::integer as port,
    has_function_privilege('pg_control_system()', 'execute') as tells_system

-- name: system_identifier
-- Not everybody may read it; `here` says who may.
select system_identifier::text from pg_control_system()

-- name: known
select system_identifier, database, database_oid, event_oid, timeline, address, port, reached_as, log_id from meta

-- name: put
update meta
set system_identifier = $1, database = $2, database_oid = $3, event_oid = $4, timeline = $5, address = $6, port = $7,
    reached_as = $8

-- name: known_positions
-- The highest position that the books or the log know of, and the highest handed out, which is read later.
select
    greatest(
        m.log_start - 1,
        (select max(greatest(c.floor, upper(c.settled) - 1)) from cursor as c),
        (select d.high from dead_range as d order by d.low desc limit 1),
        (select e.position from event as e order by e.position desc limit 1)
    ) as known,
    coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) as drawn
from meta as m

-- name: promote
update meta set incarnation = incarnation + 1 where timeline = $1 returning incarnation

-- name: horizon
-- The highest position handed out, and the lowest that it can be: that of the last event, or what lies just below the leaves that
-- follow each other without a gap to the open-ended one.
select
    coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) as drawn,
    greatest(
        (select e.position from event as e order by e.position desc limit 1),
        (
            select max(l.low) - 1
            from leaf as l
            where not exists (select from leaf as below where below.high = l.low)
        ),
        0
    ) as known

-- name: set_sequence
select setval('event_position_seq', $1)

-- name: forget_instances
-- Instances whose lock nobody holds here: a copy brought their rows along. $1 is the first half of the lock keys.
with gone as (
    delete from instance as i
    where not exists (
        select
        from pg_locks as l
        where l.locktype = 'advisory' and l.granted and l.mode = 'ExclusiveLock' and l.objsubid = 2
            and l.database = (select d.oid from pg_database as d where d.datname = current_database())
            and l.classid = $1::bigint::oid and l.objid = i.id::oid
    )
    returning i.id
),
given_back as (
    update delivery
    set state = case when attempts > 0 then 'retrying' else 'pending' end, ready_at = greatest(due_at, clock_timestamp()),
        owner = null, claim = null, claimed_at = null
    where owner in (select id from gone)
)
update cursor set owner = null where owner in (select id from gone)

-- name: cut_back
-- Forgets everything that is said about positions beyond the horizon, $1: they will be handed out again, to other events.
with cursors as (
    update cursor
    set floor = least(floor, $1), settled = settled * int8multirange(int8range(null, $1 + 1)),
        anchor_position = null, anchor_id = null, epoch = epoch + 1, revision = revision + 1
),
deliveries as (delete from delivery where position > $1),
kept as (delete from event_kept where position > $1),
skips as (delete from skip where position > $1),
skips_cut as (update skip set position_to = $1 where position <= $1 and position_to > $1),
progress_gone as (delete from progress where floor_from >= $1),
progress_cut as (update progress set floor_to = $1 where floor_from < $1 and floor_to > $1),
dead as (delete from dead_range where low > $1),
dead_cut as (update dead_range set high = $1 where low <= $1 and high > $1)
update meta
set fresh_floor = least(fresh_floor, $1), log_start = least(log_start, $1 + 1),
    pruned_to = least(pruned_to, $1), incarnation = incarnation + 1

-- name: start_over
-- All cursors to the horizon, $1, recorded as what lay before the start: epoch 0.
with forgotten as (delete from progress),
moved as (
    update cursor
    set floor = $1, settled = '{}', anchor_position = null, anchor_id = null, epoch = epoch + 1,
        revision = revision + 1, takeovers = 0
    returning subscription, lane
)
insert into progress (subscription, lane, epoch, floor_from, floor_to)
select subscription, lane, 0, 0, $1 from moved where $1 > 0

-- name: new_identity
update meta set log_id = gen_random_uuid(), incarnation = incarnation + 1, fresh_floor = $1

-- name: new_salt
select set_id_salt(random_id_salt())

-- name: deliver_nothing
-- A copy that is declared fresh delivers nothing that is in it.
delete from delivery;
delete from event_kept;
delete from dedup_0;
delete from dedup_1;
delete from dedup_2;

-- name: lock_log
-- Nobody is between drawing a position and committing it.
lock table event in share row exclusive mode

-- name: empty
-- What a reset removes besides events.
delete from event_kept;
delete from delivery;
delete from dead_range;
delete from dedup_0;
delete from dedup_1;
delete from dedup_2;
delete from skip;
delete from stream;
delete from journal;
delete from recovery;

-- name: begin_above
update meta set incarnation = incarnation + 1, log_start = $1::bigint + 1, pruned_to = $1
