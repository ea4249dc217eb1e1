-- Ends every other session of this name and waits until they have, at most $2 milliseconds each.
select pg_terminate_backend(pid, $2::bigint)
from pg_stat_activity
where datname = current_database() and application_name = $1::text and pid <> pg_backend_pid()
