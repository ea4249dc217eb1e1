-- The schema and its steps. The grants for roles are in roles.sql.

-- name: lock
select pg_advisory_xact_lock($1, 0)

-- name: exists
select to_regclass($1 || '.meta') is not null

-- name: privilege
select has_schema_privilege(to_regnamespace($1), 'usage') as usable, current_user::text as role

-- name: versions
select schema_version, breaking_version from @schema@.meta

-- name: server_version
select current_setting('server_version_num')::integer

-- name: encoding
select current_setting('server_encoding')

-- name: become_owner
-- What is made belongs to the owner of what is there.
select format('set local role %I', pg_get_userbyid(relowner))
from pg_class
where oid = $1::text::regclass and relowner <> current_user::regrole and pg_has_role(relowner, 'member')

-- name: lock_log
lock table @schema@.event in access exclusive mode

-- name: record
-- What follows each step of the schema, in the same transaction.
insert into @schema@.migration (version, name, breaking) values (@version@, '@name@', @breaking@);
update @schema@.meta set schema_version = @version@;

-- name: record_breaking
update @schema@.meta set breaking_version = @version@;

-- name: applied_at
select max(applied_at) from migration

-- name: dump
-- Everything in the schema $1, as text. Not pg_dump: that differs with the version of the client and lists what is not ours.
with parts (rank, name, part) as (
    select
        1, c.relname,
        format('table %s%s%s (%s)', c.relname, ' partition by ' || pg_get_partkeydef(c.oid),
            ' with (' || array_to_string(c.reloptions, ', ') || ')',
            (
                select string_agg(
                    format(E'\n    %s %s%s%s', a.attname, format_type(a.atttypid, a.atttypmod),
                        case when a.attnotnull then ' not null' end,
                        case when a.attidentity = 'a' then ' generated always as identity'
                            else ' default ' || pg_get_expr(d.adbin, d.adrelid) end),
                    ',' order by a.attnum)
                from pg_attribute as a
                left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
                where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
            ) || E'\n')
    from pg_class as c
    where c.relnamespace = $1::text::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
    union all
    select 2, c.relname || ' ' || o.conname, format('constraint %s of %s %s', o.conname, c.relname, pg_get_constraintdef(o.oid))
    from pg_constraint as o
    join pg_class as c on c.oid = o.conrelid
    -- Since 18 what is not null is a constraint too.
    where c.relnamespace = $1::text::regnamespace and not c.relispartition and o.contype <> 'n'
    union all
    select 3, c.relname, pg_get_indexdef(c.oid)
    from pg_class as c
    join pg_index as i on i.indexrelid = c.oid
    where c.relnamespace = $1::text::regnamespace and c.relkind in ('i', 'I') and not c.relispartition
        and not exists (select from pg_constraint as o where o.conindid = c.oid)
    union all
    select 4, 'leaves', format('%s leaves of event, the last one open-ended', count(*))
    from pg_inherits as i
    join pg_class as c on c.oid = i.inhparent
    where c.relnamespace = $1::text::regnamespace and c.relkind = 'p'
    union all
    select 5, s.sequencename::text, format('sequence %s as %s start %s increment %s cache %s', s.sequencename, s.data_type,
        s.start_value, s.increment_by, s.cache_size)
    from pg_sequences as s
    where s.schemaname = $1::text
    union all
    -- Every log has a salt of its own, and a time at which its limits were changed last.
    select
        6, p.proname || pg_get_function_identity_arguments(p.oid),
        regexp_replace(
            replace(pg_get_functiondef(p.oid), m.id_salt::text, '<salt>'), 'to_timestamp\([0-9.]+', 'to_timestamp(<time>'
        )
    from pg_proc as p, meta as m
    where p.pronamespace = $1::text::regnamespace
    union all
    select 9, t.typname, format(E'type %s as (%s)', t.typname, (
        select string_agg(format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' order by a.attnum)
        from pg_attribute as a
        where a.attrelid = t.typrelid and a.attnum > 0
    ))
    from pg_type as t
    join pg_class as c on c.oid = t.typrelid and c.relkind = 'c'
    where t.typnamespace = $1::text::regnamespace
    union all
    select 9, t.typname, format(E'domain %s as %s\n%s', t.typname, format_type(t.typbasetype, t.typtypmod), (
        select string_agg(pg_get_constraintdef(o.oid), E'\n' order by o.conname) from pg_constraint as o where o.contypid = t.oid
    ))
    from pg_type as t
    where t.typnamespace = $1::text::regnamespace and t.typtype = 'd'
    union all
    select 7, t.tgname, pg_get_triggerdef(t.oid)
    from pg_trigger as t
    join pg_class as c on c.oid = t.tgrelid
    where c.relnamespace = $1::text::regnamespace and not t.tgisinternal
    union all
    select 8, c.relname, format(E'view %s as\n%s', c.relname, pg_get_viewdef(c.oid))
    from pg_class as c
    where c.relnamespace = $1::text::regnamespace and c.relkind = 'v'
)
-- A name is cut after 63 bytes, and functions of one name differ in what follows.
select part from parts order by rank, name collate "C", part collate "C"
