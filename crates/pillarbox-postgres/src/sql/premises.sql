select
    current_setting('server_version_num')::integer,
    pg_is_in_recovery(),
    array(
        select format('%s.%I', c.relnamespace::regnamespace, c.relname)
        from pg_class as c
        where c.relpersistence <> 'p'
            and (c.oid = e.oid or c.oid in (select inhrelid from pg_inherits where inhparent = e.oid))
        order by 1
    ),
    (select attidentity::text from pg_attribute where attrelid = e.oid and attname = 'position'),
    (pg_get_serial_sequence('event', 'position')::regclass = to_regclass('event_position_seq')) is true,
    s.seqcache, s.seqincrement, s.seqcycle,
    row_security_active(e.oid),
    current_setting('default_transaction_isolation'),
    current_setting('synchronous_commit'),
    current_schema()
from pg_class as e
left join pg_sequence as s on s.seqrelid = pg_get_serial_sequence('event', 'position')::regclass
where e.oid = 'event'::regclass
