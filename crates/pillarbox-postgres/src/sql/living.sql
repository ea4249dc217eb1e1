-- The advisory locks that may be an instance's sign of life: class and number.
select l.classid::bigint, l.objid::bigint
from pg_locks as l
where l.locktype = 'advisory' and l.objsubid = 2 and l.granted and l.mode = 'ExclusiveLock'
    and l.database = (select oid from pg_database where datname = current_database())
    and l.objid::bigint in (select id from instance)
