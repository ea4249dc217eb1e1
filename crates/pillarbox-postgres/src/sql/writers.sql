-- Every INSERT takes this lock on the parent before it draws its position and keeps it until its rows are visible. A holder
-- without a transaction number is already visible and about to let go.
select virtualtransaction
from pg_locks
where locktype = 'relation'
    and database = (select oid from pg_database where datname = current_database())
    and relation = 'event'::regclass
    and mode = 'RowExclusiveLock'
    and granted
    and virtualtransaction not like '%/0'
