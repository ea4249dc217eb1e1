-- Roles of running relays of which the first may not end sessions of the second.
with used as (
    select distinct a.usesysid, a.usename
    from pg_stat_activity as a
    where a.datname = current_database() and a.application_name like 'pillarbox relay %' and a.usesysid is not null
)
select heir.usename::text, owner.usename::text
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
