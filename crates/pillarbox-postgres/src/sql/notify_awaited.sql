-- Whether several wait for the lock that every NOTIFY of the server takes through its commit; one now and then is nothing.
select count(*) >= 3
from pg_locks
where locktype = 'object' and database = 0 and classid = 'pg_database'::regclass and objid = 0 and not granted
