-- As take_end.sql, for claims: ends the sessions of instances whose beat has stood still. $3 are what the names end with.
with silent as (
    select i.id
    from unnest($1::integer[], $2::bigint[]) as w (owner, beat)
    join instance as i on i.id = w.owner and i.beat = w.beat
)
select count(pg_terminate_backend(a.pid))
from pg_stat_activity as a
join silent as s on true
join unnest($3::text[]) as n (ending) on a.application_name = 'pillarbox relay ' || s.id || n.ending
where a.datname = current_database()
    and a.pid <> pg_backend_pid()
    and case
        when (select rolsuper from pg_roles where oid = a.usesysid)
            then (select rolsuper from pg_roles where rolname = current_user)
        else pg_has_role(a.usesysid, 'usage') or pg_has_role('pg_signal_backend', 'usage')
    end
