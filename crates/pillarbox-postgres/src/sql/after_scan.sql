-- Read after the rows: whatever retention took away before they were read shows in log_start now.
select
    log_start, incarnation,
    pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn() or current_setting('synchronous_standby_names') <> ''
from meta
