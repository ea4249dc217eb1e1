-- Every INSERT takes this lock on the parent before it draws its position and keeps it until its rows are visible. A holder
-- without a transaction number is already visible and about to let go. Whether it is prepared, and since when it is idle as
-- far as this role may know.
select l.virtualtransaction, l.pid is null, case when a.state like 'idle in transaction%' then a.state_change end,
    clock_timestamp()
from pg_locks as l
left join lateral pg_stat_get_activity(coalesce(l.pid, -1)) as a on true
where l.locktype = 'relation'
    and l.database = (select oid from pg_database where datname = current_database())
    and l.relation = 'event'::regclass
    and l.mode = 'RowExclusiveLock'
    and l.granted
    and l.virtualtransaction not like '%/0'
