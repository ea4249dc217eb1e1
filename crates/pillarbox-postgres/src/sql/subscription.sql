-- Subscriptions with their definitions.

-- name: known_names
select name from subscription where name = any ($1)

-- name: define
insert into subscription (name, filter, mode, lanes, on_dead, hold_ms, retry, processing_timeout_ms, defined_by)
select n.name, n.filter, n.mode, n.lanes, n.on_dead, n.hold_ms, n.retry, n.processing_timeout_ms, $9::bigint
from unnest($1::text[], $2::text[], $3::text[], $4::integer[], $5::text[], $6::bigint[], $7::text[], $8::bigint[])
    with ordinality
    as n (name, filter, mode, lanes, on_dead, hold_ms, retry, processing_timeout_ms, ordinal)
order by n.ordinal
-- Another relay may have been faster; its row is found when its transaction has ended.
on conflict (name) do nothing
returning id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms, mode, hold_ms

-- name: find
-- In the order of their names, as everybody locks them.
select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms, mode, hold_ms
from subscription
where name = any ($1::text[])
order by name collate "C"
for update

-- name: redefine
update subscription
set filter = $2, on_dead = $3, hold_ms = $4, retry = $5, processing_timeout_ms = $6, defined_by = $7, definition = definition + 1
where id = $1
returning id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms, mode, hold_ms

-- name: load
select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms
from subscription
where id = any ($1::bigint[])

-- name: fleet
select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms from subscription order by id

-- name: subscriptions
select id, name, filter, mode, on_dead, hold_ms, paused, paused_by, paused_reason, retry, definition
from subscription
order by name collate "C"

-- name: lock
select from subscription where name = $1 for update

-- name: lock_all
-- In the order of their names, as everybody locks them.
select from subscription order by name collate "C" for update

-- name: former_filters
select former_filters from subscription where id = $1

-- name: former_filters_and_time
select former_filters, clock_timestamp() as now from subscription where id = $1

-- name: lock_former_filters
select former_filters from subscription where id = $1 for update

-- name: former_filters_of_all
select id, former_filters from subscription

-- name: set_former_filters
update subscription set former_filters = $2 where id = $1

-- name: set_pause
update subscription set paused = $2, paused_by = $3, paused_reason = $4 where id = $1

-- name: rename
update subscription set name = $2 where id = $1

-- name: set_lanes
update subscription set lanes = $2 where id = $1

-- name: remove_deliveries
delete from delivery where subscription = $1

-- name: remove_cursors
delete from cursor where subscription = $1

-- name: remove_progress
delete from progress where subscription = $1

-- name: remove_skips
delete from skip where subscription = $1

-- name: remove_recovered
delete from recovery where subscription = $1

-- name: remove
delete from subscription where id = $1
