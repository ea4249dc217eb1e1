-- The row of values that belong to the whole log.

-- name: lock
-- Whoever prunes has this lock alone; whoever joins, rewinds or subscribes shares it.
select from meta for update

-- name: share
select from meta for share

-- name: share_start
select log_start, fresh_floor from meta for share

-- name: identity
select log_id, incarnation, clock_timestamp() as now from meta

-- name: snapshot
select
    clock_timestamp() as now, coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) as horizon, log_start, fresh_floor,
    log_id, incarnation, schema_version, current_schema() as schema, pruned_to, retention_keep_ms, recovery_at
from meta

-- name: publishing
-- Whether publishers are to look at the bell, whether the default that does so is there, and whether events are checked.
select
    m.doorbell,
    exists (
        select
        from pg_attrdef as d
        join pg_attribute as a on a.attrelid = d.adrelid and a.attnum = d.adnum
        where d.adrelid = 'event'::regclass and a.attname = 'created_at' and pg_get_expr(d.adbin, d.adrelid) like '%pg_notify(%'
    ) as rings,
    exists (
        select
        from pg_index as i
        where i.indexrelid = to_regclass('event_id') and i.indrelid = 'event'::regclass and i.indisvalid
            and pg_get_expr(i.indpred, i.indrelid) like '%is_well_formed(%'
    ) as is_checked,
    current_schema() as schema
from meta as m

-- name: id_salt
select id_salt, event_id(1, 'epoch') as first_id from meta

-- name: after_scan
-- Read after the rows: whatever retention took away before they were read shows in log_start now.
select
    log_start, incarnation,
    pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn() or current_setting('synchronous_standby_names') <> ''
        as is_volatile
from meta

-- name: after_look
-- Read after the anchors: whatever retention took away before they were read shows in pruned_to now.
select
    -- A journal may begin below.
    pruned_to + 1 as kept_from,
    doorbell,
    clock_timestamp() as now,
    -- Whether there are enough changes to be added up.
    (select count(*) from (select from aside_count limit 1000) as changes) = 1000 as uncounted
from meta

-- name: set_retention
update meta
set retention_keep_ms = coalesce($1, retention_keep_ms),
    retention_dead_ms = coalesce($2, retention_dead_ms),
    retention_inbox_ms = coalesce($3, retention_inbox_ms)

-- name: set_payload_bytes_max
select set_payload_bytes_max($1)

-- name: set_dedup_window
update meta set dedup_window_ms = $1, dedup_changed_at = clock_timestamp() where dedup_window_ms <> $1
