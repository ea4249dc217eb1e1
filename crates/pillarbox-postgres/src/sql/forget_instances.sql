-- Instances whose lock nobody holds here: a copy brought their rows along. $1 is the first half of the lock keys.
with gone as (
    delete from instance as i
    where not exists (
        select
        from pg_locks as l
        where l.locktype = 'advisory' and l.granted and l.mode = 'ExclusiveLock' and l.objsubid = 2
            and l.database = (select d.oid from pg_database as d where d.datname = current_database())
            and l.classid = $1::bigint::oid and l.objid = i.id::oid
    )
    returning i.id
),
given_back as (
    update delivery
    set state = case when attempts > 0 then 'retrying' else 'pending' end, ready_at = greatest(due_at, clock_timestamp()),
        owner = null, claim = null, claimed_at = null
    where owner in (select id from gone)
)
update cursor set owner = null where owner in (select id from gone)
