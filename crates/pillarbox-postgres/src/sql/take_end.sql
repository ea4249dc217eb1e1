-- Ends the sessions of owners whose beat has stood still, as far as this role may: one that is frozen or cut off may hold the locks of
-- what is to be taken. Whoever has beaten since lives and is left alone. $5 are what the names of an instance's sessions end with.
with silent as (
    select distinct i.id
    from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[]) as w (subscription, lane, expected, beat)
    join cursor as c on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.expected
    join instance as i on i.id = c.owner and i.beat = w.beat
)
select count(pg_terminate_backend(a.pid))
from pg_stat_activity as a
join silent as s on true
join unnest($5::text[]) as n (ending) on a.application_name = 'pillarbox relay ' || s.id || n.ending
where a.datname = current_database()
    and a.pid <> pg_backend_pid()
    and case
        when (select rolsuper from pg_roles where oid = a.usesysid)
            then (select rolsuper from pg_roles where rolname = current_user)
        else pg_has_role(a.usesysid, 'usage') or pg_has_role('pg_signal_backend', 'usage')
    end
