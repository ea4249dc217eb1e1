-- Takes a lock of the doorbell if nobody has it; whether this session has it now. One that it has already is not taken again.
select case
    when exists (
        select from pg_locks
        where locktype = 'advisory'
            and database = (select oid from pg_database where datname = current_database())
            and classid = $1::integer::bigint::oid and objid = $2::integer::bigint::oid and objsubid = 2
            and mode = 'ExclusiveLock' and pid = pg_backend_pid() and granted
    ) then true
    else pg_try_advisory_lock($1, $2)
end
