-- Sessions of Pillarbox that keep a snapshot for longer than they ever should.
select pid
from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and application_name like 'pillarbox%'
    and backend_xmin is not null and greatest(xact_start, query_start) < clock_timestamp() - $1::double precision * interval '1 second'
order by pid
