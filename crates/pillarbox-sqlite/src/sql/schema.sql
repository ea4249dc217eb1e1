-- The schema and its steps.

-- name: exists
select 1 from sqlite_master where type = 'table' and name = 'pillarbox_meta'

-- name: record
-- What follows each step of the schema, in the same transaction.
insert into pillarbox_migration (version, name, breaking, applied_at)
values (@version@, '@name@', @breaking@, cast(strftime('%s', 'now') as integer) * 1000);
insert or replace into pillarbox_meta (name, value) values ('schema_version', @version@);

-- name: record_breaking
insert or replace into pillarbox_meta (name, value) values ('breaking_version', @version@);

-- name: set_check
-- Writes another check into the table of events: ?2 in place of ?1.
update sqlite_master set sql = replace(sql, ?1, ?2) where name = 'pillarbox_event' and instr(sql, ?1) > 0

-- name: applied_at
select max(applied_at) from pillarbox_migration

-- name: dump
select sql
from sqlite_master
where sql is not null and name like 'pillarbox\_%' escape '\'
order by
    case type when 'table' then 1 when 'index' then 2 when 'view' then 3 else 4 end,
    name
