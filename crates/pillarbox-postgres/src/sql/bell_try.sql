-- Takes the doorbell's lock if nobody has it; else says whether another relay has it, or waits for it.
select
    pg_try_advisory_lock($1::integer, $2::integer),
    exists (
        select from pg_locks
        where locktype = 'advisory'
            and database = (select oid from pg_database where datname = current_database())
            and classid = $1::bigint::oid and objid = $2::bigint::oid and objsubid = 2
            and mode = 'ExclusiveLock' and pid <> pg_backend_pid()
    )
