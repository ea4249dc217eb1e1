-- Lets go of the doorbell's lock however often this session has it, and says nothing if it does not.
select pg_advisory_unlock($1::integer, $2::integer)
from pg_locks
where locktype = 'advisory'
    and database = (select oid from pg_database where datname = current_database())
    and classid = $1::bigint::oid and objid = $2::bigint::oid and objsubid = 2
    and mode = 'ExclusiveLock' and pid = pg_backend_pid() and granted
