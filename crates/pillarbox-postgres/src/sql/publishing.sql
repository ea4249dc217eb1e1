-- Whether publishers are to look at the bell, whether the default that does so is there, and whether events are checked.
select
    m.doorbell,
    exists (
        select
        from pg_attrdef as d
        join pg_attribute as a on a.attrelid = d.adrelid and a.attnum = d.adnum
        where d.adrelid = 'event'::regclass and a.attname = 'created_at' and pg_get_expr(d.adbin, d.adrelid) like '%pg_notify(%'
    ),
    exists (
        select
        from pg_index as i
        where i.indexrelid = to_regclass('event_id') and i.indrelid = 'event'::regclass and i.indisvalid
            and pg_get_expr(i.indpred, i.indrelid) like '%is_well_formed(%'
    ),
    current_schema()
from meta as m
