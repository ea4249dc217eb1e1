-- Ends every other session of this role with this name and waits until they have, at most $2 milliseconds each. Anybody can take the name;
-- a former session of this relay has its role.
select pg_terminate_backend(pid, $2::bigint)
from pg_stat_activity
where datname = current_database() and application_name = $1::text and pid <> pg_backend_pid() and usename = current_user
