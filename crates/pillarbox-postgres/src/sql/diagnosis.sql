-- What `doctor`, `status` and the check of the premises look for.

-- name: premises
select
    current_setting('server_version_num')::integer as version,
    pg_is_in_recovery() as is_standby,
    array(
        select format('%s.%I', c.relnamespace::regnamespace, c.relname)
        from pg_class as c
        where c.relpersistence <> 'p'
            and (c.oid = e.oid or c.oid in (select inhrelid from pg_inherits where inhparent = e.oid))
        order by 1
    ) as unlogged,
    (select attidentity::text from pg_attribute where attrelid = e.oid and attname = 'position') as identity,
    (pg_get_serial_sequence('event', 'position')::regclass = to_regclass('event_position_seq')) is true as has_own_sequence,
    s.seqcache, s.seqincrement, s.seqcycle,
    row_security_active(e.oid) as hides_rows,
    current_setting('default_transaction_isolation') as isolation,
    current_setting('synchronous_commit') as synchronous_commit,
    current_schema() as schema
from pg_class as e
left join pg_sequence as s on s.seqrelid = pg_get_serial_sequence('event', 'position')::regclass
where e.oid = 'event'::regclass

-- name: server
-- What doctor asks of the server.
select
    current_setting('max_prepared_transactions')::integer as max_prepared,
    current_setting('synchronous_standby_names') as standbys,
    current_setting('fsync') = 'on' and current_setting('full_page_writes') = 'on' as is_safe,
    current_setting('autovacuum') = 'on' as autovacuum,
    array(
        select format('%s.%I', c.relnamespace::regnamespace, c.relname)
        from pg_class as c
        where c.relnamespace = current_schema()::regnamespace and 'autovacuum_enabled=false' = any(c.reloptions)
        order by 1
    ) as autovacuum_off_for,
    (select count(*) from pg_stat_activity where backend_type = 'client backend') as connections,
    (select count(*) from pg_stat_activity where backend_type = 'client backend' and application_name like 'pillarbox%')
        as own_connections,
    current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint as connections_max,
    current_user::text as role,
    (select pg_has_role(current_user, relowner, 'usage') from pg_class where oid = 'event'::regclass) as owns_log

-- name: broken_anchor
select a.position, a.id
from unnest($1::bigint[], $2::uuid[]) as a (position, id)
where not exists (
    select from event as e where e.position = a.position and coalesce(e.id, event_id(e.position, e.created_at)) = a.id
)
limit 1

-- name: deliveries_without_event
select count(*)
from delivery as d
where not exists (select from event as e where e.position = d.position)
    and not exists (select from event_kept as k where k.position = d.position)

-- name: events_in_dead_ranges
select count(*) from dead_range as d join event as e on e.position between d.low and d.high

-- name: holders
-- Who has published and not ended: their positions are holes, and no floor rises above them.
select
    l.pid, quote_literal(p.gid) as gid, coalesce(a.usename, p.owner)::text as role, a.application_name, a.state,
    extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::double precision as seconds,
    quote_ident(current_user) as looks
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

-- name: snapshot_holders
-- Who keeps vacuum from removing old rows in this database, the longest first.
select
    pid, null as gid, usename::text as role, application_name, state,
    extract(epoch from clock_timestamp() - xact_start)::double precision as seconds, quote_ident(current_user) as looks
from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and (backend_xmin is not null or backend_xid is not null)
    and backend_type = 'client backend'
union all
select null, quote_literal(gid), owner::text, null, null, extract(epoch from clock_timestamp() - prepared)::double precision,
    quote_ident(current_user)
from pg_prepared_xacts
where database = current_database()
order by 6 desc nulls last
limit $1::bigint

-- name: old_snapshots
-- Sessions of Pillarbox that keep a snapshot for longer than they ever should.
select pid
from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and application_name like 'pillarbox%'
    and backend_xmin is not null and greatest(xact_start, query_start) < clock_timestamp() - $1::double precision * interval '1 second'
order by pid

-- name: grants
-- What gives a role other than the owner a way to insert a position or a time of its choice, or an event unseen by readers: the object,
-- the role and the privilege, as a REVOKE writes them.
select
    case c.relkind when 'S' then 'sequence ' else '' end || format('%s.%I', c.relnamespace::regnamespace, c.relname) as relation,
    coalesce(quote_ident(r.rolname), 'public') as grantee, g.privilege_type::text as privilege
from pg_class as c
cross join lateral aclexplode(c.relacl) as g
left join pg_roles as r on r.oid = g.grantee
where g.grantee <> c.relowner
    and (
        (c.oid = 'event'::regclass and g.privilege_type = 'INSERT')
        or (c.oid in (select inhrelid from pg_inherits where inhparent = 'event'::regclass) and g.privilege_type = 'INSERT')
        or (c.oid = to_regclass('event_position_seq') and g.privilege_type in ('USAGE', 'UPDATE'))
    )
union all
select
    format('%s.%I', c.relnamespace::regnamespace, c.relname), coalesce(quote_ident(r.rolname), 'public'),
    g.privilege_type || ' (' || a.attname || ')'
from pg_attribute as a
join pg_class as c on c.oid = a.attrelid
cross join lateral aclexplode(a.attacl) as g
left join pg_roles as r on r.oid = g.grantee
where a.attrelid = 'event'::regclass and a.attname in ('position', 'stream_version', 'created_at') and g.privilege_type = 'INSERT'
    and g.grantee <> c.relowner
order by 1, 2, 3

-- name: strangers
-- Roles of running relays of which the first may not end sessions of the second.
with used as (
    select distinct a.usesysid, a.usename
    from pg_stat_activity as a
    where a.datname = current_database() and a.application_name like 'pillarbox relay %' and a.usesysid is not null
)
select heir.usename::text as heir, owner.usename::text as owner
from used as heir
join used as owner on owner.usesysid <> heir.usesysid
join pg_roles as h on h.oid = heir.usesysid
join pg_roles as o on o.oid = owner.usesysid
where not h.rolsuper
    and (
        o.rolsuper
        or not (pg_has_role(h.oid, o.oid, 'usage') or pg_has_role(h.oid, 'pg_signal_backend', 'usage'))
    )
order by 1, 2
