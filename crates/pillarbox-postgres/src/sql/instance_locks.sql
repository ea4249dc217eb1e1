-- Who holds a lock of this log alone: 0 and 2147483647 are the doorbell's, the others are instances.
select objid::bigint, pid = pg_backend_pid()
from pg_locks
where locktype = 'advisory'
    and database = (select oid from pg_database where datname = current_database())
    and classid = $1::bigint::oid
    and objsubid = 2
    and mode = 'ExclusiveLock'
    and granted
