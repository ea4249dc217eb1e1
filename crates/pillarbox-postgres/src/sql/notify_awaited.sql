-- Whether somebody waits for the lock that every NOTIFY of the server takes through its commit.
select exists (
    select from pg_locks
    where locktype = 'object' and database = 0 and classid = 'pg_database'::regclass and objid = 0 and not granted
)
