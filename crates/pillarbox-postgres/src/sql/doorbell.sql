-- Ringing, and who keeps the doorbell.

-- name: listen
listen @schema@

-- name: announce
select pg_notify(current_schema(), $1)

-- name: try
-- Takes a lock of the doorbell if it is free, and limits how long this session may then ask nothing: in one statement, so that no instance
-- can stand still with the lock and without the limit. Whether this session has the lock now; one that it has already is not taken again.
select case
    when exists (
        select from pg_locks
        where locktype = 'advisory'
            and database = (select oid from pg_database where datname = current_database())
            and classid = $1::integer::bigint::oid and objid = $2::integer::bigint::oid and objsubid = 2
            and mode = 'ExclusiveLock' and pid = pg_backend_pid() and granted
    ) or pg_try_advisory_lock($1, $2) then set_config('idle_session_timeout', $3, false) is not null
    else false
end

-- name: release
-- Lets go of a lock of the doorbell, and says nothing if this session does not have it.
select pg_advisory_unlock($1::integer, $2::integer)
from pg_locks
where locktype = 'advisory'
    and database = (select oid from pg_database where datname = current_database())
    and classid = $1::bigint::oid and objid = $2::bigint::oid and objsubid = 2
    and mode = 'ExclusiveLock' and pid = pg_backend_pid() and granted

-- name: contended
-- Whether several wait for the lock that every NOTIFY of the server takes through its commit; one now and then is nothing.
select count(*) >= 3
from pg_locks
where locktype = 'object' and database = 0 and classid = 'pg_database'::regclass and objid = 0 and not granted

-- name: is_on
select doorbell from meta

-- name: set
select @schema@.set_doorbell(@on@);

-- name: allows_prepared
select current_setting('max_prepared_transactions')::integer > 0
