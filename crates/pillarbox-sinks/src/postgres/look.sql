-- What is there under two names: the table and its fence.
select
    class.oid is not null as found,
    coalesce(class.relkind in ('r', 'p') and class.relpersistence = 'p', false) as durable,
    exists (
        select from pg_index as index
        where index.indrelid = class.oid and index.indisunique and index.indisvalid and index.indpred is null
            and index.indimmediate
            and wanted.arbiter = (
                select string_agg(attribute.attname, ',' order by attribute.attname)
                from pg_attribute as attribute
                where attribute.attrelid = class.oid
                    and attribute.attnum = any (index.indkey[0:index.indnkeyatts - 1])
            )
    ) as unique,
    coalesce(has_any_column_privilege(class.oid, 'insert'), false) as insert,
    coalesce(has_any_column_privilege(class.oid, 'select'), false) as select,
    coalesce(has_any_column_privilege(class.oid, 'update'), false) as update
from unnest($1::text[], $2::text[]) with ordinality as wanted (name, arbiter, place)
left join pg_class as class on class.oid = to_regclass(wanted.name)
order by wanted.place
