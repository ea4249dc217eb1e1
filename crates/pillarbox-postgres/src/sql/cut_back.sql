-- Forgets everything that is said about positions beyond the horizon, $1: they will be handed out again, to other events.
with cursors as (
    update cursor
    set floor = least(floor, $1), settled = settled * int8multirange(int8range(null, $1 + 1)),
        anchor_position = null, anchor_id = null, epoch = epoch + 1, revision = revision + 1
),
deliveries as (delete from delivery where position > $1),
kept as (delete from event_kept where position > $1),
skips as (delete from skip where position > $1),
skips_cut as (update skip set position_to = $1 where position <= $1 and position_to > $1),
progress_gone as (delete from progress where floor_from >= $1),
progress_cut as (update progress set floor_to = $1 where floor_from < $1 and floor_to > $1),
dead as (delete from dead_range where low > $1),
dead_cut as (update dead_range set high = $1 where low <= $1 and high > $1)
update meta
set fresh_floor = least(fresh_floor, $1), log_start = least(log_start, $1 + 1),
    pruned_to = least(pruned_to, $1), incarnation = incarnation + 1
