-- Transactions that have used the log and are not over: nobody gets it for himself before they are.
select virtualtransaction
from pg_locks
where locktype = 'relation'
    and database = (select oid from pg_database where datname = current_database())
    and relation = 'event'::regclass
    and granted
    and pid is distinct from pg_backend_pid()
