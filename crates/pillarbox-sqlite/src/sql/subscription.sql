-- Subscriptions with their definitions.

-- name: find
select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms
from pillarbox_subscription
where name = ?1

-- name: by_id
select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms
from pillarbox_subscription
where id = ?1

-- name: fleet
select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms
from pillarbox_subscription
order by id

-- name: subscriptions
select id, name, filter, mode, on_dead, hold_ms, paused, paused_by, paused_reason, retry, definition
from pillarbox_subscription
order by name

-- name: lanes_of_queue
select lanes from pillarbox_subscription where id = ?1 and mode = 'queue'

-- name: is_queue_and_blocks
select mode = 'queue' as is_queue, on_dead = 'block' as blocks from pillarbox_subscription where id = ?1

-- name: mode_and_hold
select mode, hold_ms from pillarbox_subscription where name = ?1

-- name: define
insert into pillarbox_subscription (
    name, filter, mode, lanes, on_dead, hold_ms, retry, processing_timeout_ms, defined_by, created_at
)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
on conflict (name) do update set
    filter = excluded.filter,
    on_dead = excluded.on_dead,
    hold_ms = excluded.hold_ms,
    retry = excluded.retry,
    processing_timeout_ms = excluded.processing_timeout_ms,
    defined_by = excluded.defined_by,
    definition = definition + 1

-- name: former_filters
select former_filters from pillarbox_subscription where id = ?1

-- name: set_former_filters
update pillarbox_subscription set former_filters = ?2 where id = ?1

-- name: set_pause
update pillarbox_subscription set paused = ?2, paused_by = ?3, paused_reason = ?4 where id = ?1

-- name: rename
update pillarbox_subscription set name = ?2 where id = ?1

-- name: set_lanes
update pillarbox_subscription set lanes = ?2 where id = ?1

-- name: remove_deliveries
delete from pillarbox_delivery where subscription = ?1

-- name: remove_cursors
delete from pillarbox_cursor where subscription = ?1

-- name: remove_progress
delete from pillarbox_progress where subscription = ?1

-- name: remove_skips
delete from pillarbox_skip where subscription = ?1

-- name: remove_recovered
delete from pillarbox_recovery where subscription = ?1

-- name: remove
delete from pillarbox_subscription where id = ?1
