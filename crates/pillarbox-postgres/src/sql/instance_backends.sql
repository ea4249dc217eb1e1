select application_name, pid
from pg_stat_activity
where datname = current_database() and application_name = any($1::text[])
