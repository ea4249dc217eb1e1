-- Ends what is left of instances that have ended, as far as this role may.
select pg_terminate_backend(a.pid)
from pg_stat_activity as a
where a.datname = current_database()
    and a.application_name = any($1::text[])
    and a.pid <> pg_backend_pid()
    and case
        when (select rolsuper from pg_roles where oid = a.usesysid)
            then (select rolsuper from pg_roles where rolname = current_user)
        else pg_has_role(a.usesysid, 'usage') or pg_has_role('pg_signal_backend', 'usage')
    end
