-- What gives a role other than the owner a way to insert a position or a time of its choice, or an event unseen by readers: the object,
-- the role and the privilege, as a REVOKE writes them.
select
    case c.relkind when 'S' then 'sequence ' else '' end || format('%s.%I', c.relnamespace::regnamespace, c.relname),
    coalesce(quote_ident(r.rolname), 'public'), g.privilege_type::text
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
