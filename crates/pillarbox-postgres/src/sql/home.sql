-- Where this session is. Nothing but the system identifier, which not everybody may read; see home_system.sql.
select
    current_database()::text,
    (select d.oid::bigint from pg_database as d where d.datname = current_database()),
    'event'::regclass::oid::bigint,
    -- The control file still names the old timeline for a while after a promotion; the name of the WAL file does not.
    case
        when not pg_is_in_recovery()
        then ('x' || substring(pg_walfile_name(pg_current_wal_lsn()) from 1 for 8))::bit(32)::integer
    end,
    -- Every host calls itself by these, and a copy on another one does too.
    case when not inet_server_addr() <<= '127.0.0.0/8' and inet_server_addr() <> '::1' then host(inet_server_addr()) end,
    current_setting('port')::integer,
    has_function_privilege('pg_control_system()', 'execute')
