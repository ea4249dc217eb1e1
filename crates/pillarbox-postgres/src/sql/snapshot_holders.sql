-- Who keeps vacuum from removing old rows in this database, the longest first.
select pid, null, usename::text, application_name, state, extract(epoch from clock_timestamp() - xact_start)::double precision,
    quote_ident(current_user)
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
