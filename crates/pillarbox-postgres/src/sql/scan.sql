-- A scan of one stretch of the log.

-- name: scan
-- One stretch of the log: every visible position, and the content of what may be wanted.
select
    position, topic, type, id, key,
    case when $4 or topic = any($5) or topic like any($6) then payload end,
    case when $4 or topic = any($5) or topic like any($6) then payload_bytes end,
    case when $4 or topic = any($5) or topic like any($6) then content_type end,
    case when $4 or topic = any($5) or topic like any($6) then headers end,
    stream_version, deliver_at, created_at,
    -- Read once, after the snapshot was taken; see `after_scan` of meta.sql.
    (select pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn() or current_setting('synchronous_standby_names') <> '')
from event
where position > $1 and position <= $2
order by position
limit $3
