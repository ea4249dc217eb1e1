-- Lets go of a lock of the doorbell, and says nothing if this session does not have it.
select pg_advisory_unlock($1::integer, $2::integer)
from pg_locks
where locktype = 'advisory'
    and database = (select oid from pg_database where datname = current_database())
    and classid = $1::bigint::oid and objid = $2::bigint::oid and objsubid = 2
    and mode = 'ExclusiveLock' and pid = pg_backend_pid() and granted
