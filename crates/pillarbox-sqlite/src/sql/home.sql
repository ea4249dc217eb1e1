-- What happens to the whole log when it is adopted, declared fresh or reset.

-- name: forget_anchors
update pillarbox_cursor set anchor_position = null, anchor_id = null, epoch = epoch + 1

-- name: instances
select id from pillarbox_instance

-- name: free_lanes
update pillarbox_cursor set owner = null where owner = ?1

-- name: cursors
select subscription, lane, floor, settled from pillarbox_cursor

-- name: cut_cursor
update pillarbox_cursor set floor = ?3, settled = ?4 where subscription = ?1 and lane = ?2

-- name: remove_skips
delete from pillarbox_skip where position > ?1

-- name: cut_skips
update pillarbox_skip set position_to = ?1 where position_to > ?1

-- name: cut_deliveries
-- From here to `cut_log_start`: forgets what is said about positions beyond the horizon, ?1. They will be handed out again.
delete from pillarbox_delivery where position > ?1

-- name: cut_kept
delete from pillarbox_event_kept where position > ?1

-- name: remove_progress_above
delete from pillarbox_progress where floor_from >= ?1

-- name: cut_progress
update pillarbox_progress set floor_to = ?1 where floor_to > ?1

-- name: remove_dead_ranges
delete from pillarbox_dead_range where low > ?1

-- name: cut_dead_ranges
update pillarbox_dead_range set high = ?1 where high > ?1

-- name: cut_meta
update pillarbox_meta set value = ?1 where name in ('pruned_to', 'fresh_floor') and value > ?1

-- name: cut_log_start
update pillarbox_meta set value = ?1 + 1 where name = 'log_start' and value > ?1 + 1

-- name: subscriptions
select id from pillarbox_subscription

-- name: queues
select id from pillarbox_subscription where mode = 'queue'

-- name: deliver_nothing
-- A copy that is declared fresh delivers nothing that is in it.
delete from pillarbox_delivery;
delete from pillarbox_dedup;
delete from pillarbox_event_kept;

-- name: remove_progress
delete from pillarbox_progress

-- name: start_over
update pillarbox_cursor
set floor = ?1, settled = '', anchor_position = null, anchor_id = null, epoch = epoch + 1,
    revision = revision + 1, takeovers = 0

-- name: lanes
select subscription, lane from pillarbox_cursor

-- name: reset
delete from pillarbox_event;
delete from pillarbox_event_kept;
delete from pillarbox_delivery;
delete from pillarbox_recovery;
delete from pillarbox_dead_range;
delete from pillarbox_dedup;
delete from pillarbox_skip;
delete from pillarbox_stream;
