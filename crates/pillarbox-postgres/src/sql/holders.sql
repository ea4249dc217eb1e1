-- Who has published and not ended: their positions are holes, and no floor rises above them.
select
    l.pid, quote_literal(p.gid), coalesce(a.usename, p.owner)::text, a.application_name, a.state,
    extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::double precision, quote_ident(current_user)
from pg_locks as l
left join pg_stat_activity as a on a.pid = l.pid
-- A prepared transaction has no process; its own number is another of its locks.
left join lateral (
    select x.gid, x.owner, x.prepared
    from pg_locks as t
    join pg_prepared_xacts as x on x.transaction = t.transactionid
    where t.locktype = 'transactionid' and t.pid is null and t.virtualtransaction = l.virtualtransaction
    limit 1
) as p on l.pid is null
where l.locktype = 'relation'
    and l.database = (select oid from pg_database where datname = current_database())
    and l.relation = 'event'::regclass
    and l.mode = 'RowExclusiveLock'
    and l.granted
    and l.virtualtransaction not like '%/0'
    and l.pid is distinct from pg_backend_pid()
order by 6 desc nulls last
limit $1::bigint
