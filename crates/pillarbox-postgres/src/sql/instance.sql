-- Instances: the rows, locks and sessions of running relays.

-- name: next
-- A number that was never used.
select nextval(pg_get_serial_sequence('instance', 'id'))

-- name: hold_lock
-- Takes the lock that shows that the instance lives, if no other session has it.
select pg_backend_pid() as pid, pg_try_advisory_lock($1, $2) as held

-- name: backend
select pg_backend_pid()

-- name: enter
insert into instance (id, host, pid, version, subscriptions)
overriding system value
values ($1, $2, $3, $4, $5)

-- name: exists
select exists (select from instance where id = $1)

-- name: beat
update instance
set beat = beat + 1, beat_at = clock_timestamp(), report = $2
where id = $1
returning beat

-- name: fleet
select id, beat, subscriptions, report from instance order by id

-- name: instances
select id, host, pid, version, started_at, beat_at, subscriptions, report
from instance
order by id

-- name: locks
-- Who holds a lock of this log alone: 0 and 2147483647 are the doorbell's, the others are instances.
select objid::bigint as instance, pid = pg_backend_pid() as is_own
from pg_locks
where locktype = 'advisory'
    and database = (select oid from pg_database where datname = current_database())
    and classid = $1::bigint::oid
    and objsubid = 2
    and mode = 'ExclusiveLock'
    and granted

-- name: living
-- The advisory locks that may be an instance's sign of life: class and number.
select l.classid::bigint as class, l.objid::bigint as number
from pg_locks as l
where l.locktype = 'advisory' and l.objsubid = 2 and l.granted and l.mode = 'ExclusiveLock'
    and l.database = (select oid from pg_database where datname = current_database())
    and l.objid::bigint in (select id from instance)

-- name: backends
select application_name, pid
from pg_stat_activity
where datname = current_database() and application_name = any($1::text[])

-- name: wait_for_lock
-- Waits until a lock is free, for two seconds at most.
select wait_for_lock($1, $2, true)

-- name: end_sessions
-- Ends what is left of instances that have ended, as far as this role may.
select pg_terminate_backend(a.pid)
from pg_stat_activity as a
where a.datname = current_database()
    and a.application_name = any($1::text[])
    and a.pid <> pg_backend_pid()
    and case
        when (select rolsuper from pg_roles where oid = a.usesysid)
            then (select rolsuper from pg_roles where rolname = current_user)
        else pg_has_role(a.usesysid, 'usage') or pg_has_role('pg_signal_backend', 'usage')
    end

-- name: end_holders
-- Ends what the session $1 waits for, directly or behind others: sessions of commands that have stood still for $2 milliseconds inside a
-- transaction, or whose client takes nothing more. As far as this role may.
with recursive blocked (pid) as (
    select a.pid from pg_stat_activity as a where a.datname = current_database() and a.application_name = $1::text
    union
    select h.pid from blocked as b cross join lateral unnest(pg_blocking_pids(b.pid)) as h (pid)
)
select count(pg_terminate_backend(a.pid))
from blocked as b
join pg_stat_activity as a on a.pid = b.pid
where a.datname = current_database()
    and (a.application_name = 'pillarbox operator' or a.application_name like 'pillarbox relay % operator%')
    and (a.state like 'idle in transaction%' or a.wait_event = 'ClientWrite')
    and a.state_change < clock_timestamp() - $2::bigint * interval '1 millisecond'
    and case
        when (select rolsuper from pg_roles where oid = a.usesysid)
            then (select rolsuper from pg_roles where rolname = current_user)
        else pg_has_role(a.usesysid, 'usage') or pg_has_role('pg_signal_backend', 'usage')
    end

-- name: end_session
-- Ends every other session of this role with this name and waits until they have, at most $2 milliseconds each. Anybody can take the name;
-- a former session of this relay has its role.
select pg_terminate_backend(pid, $2::bigint)
from pg_stat_activity
where datname = current_database() and application_name = $1::text and pid <> pg_backend_pid() and usename = current_user

-- name: give_up
-- Ends an instance: its lanes are free under a new epoch, its claims go back as if they had never been made.
with lanes as (
    update cursor set owner = null, epoch = epoch + 1 where owner = $1::integer
), claims as (
    update delivery
    set state = case when attempts > 0 then 'retrying' else 'pending' end, ready_at = greatest(due_at, clock_timestamp()),
        owner = null, claim = null, claimed_at = null
    where owner = $1
)
delete from instance where id = $1

-- name: bury
-- Claims are recovered from whoever made them as long as he has a row, and at once.
delete from instance as i
where (i.id = any($1::integer[]) or (i.id = any($2::integer[]) and i.beat_at < clock_timestamp() - $3::float8 * interval '1 second'))
    and not exists (select from cursor as c where c.owner = i.id)
    and (select d.position from delivery as d where d.owner = i.id limit 1) is null

-- name: remove
delete from instance where id = $1
