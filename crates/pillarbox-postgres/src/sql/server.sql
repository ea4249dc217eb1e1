-- What doctor asks of the server.
select
    current_setting('max_prepared_transactions')::integer,
    current_setting('synchronous_standby_names'),
    current_setting('fsync') = 'on' and current_setting('full_page_writes') = 'on',
    current_setting('autovacuum') = 'on',
    array(
        select format('%s.%I', c.relnamespace::regnamespace, c.relname)
        from pg_class as c
        where c.relnamespace = current_schema()::regnamespace and 'autovacuum_enabled=false' = any(c.reloptions)
        order by 1
    ),
    (select count(*) from pg_stat_activity where backend_type = 'client backend'),
    (select count(*) from pg_stat_activity where backend_type = 'client backend' and application_name like 'pillarbox%'),
    current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint,
    current_user::text,
    (select pg_has_role(current_user, relowner, 'usage') from pg_class where oid = 'event'::regclass)
