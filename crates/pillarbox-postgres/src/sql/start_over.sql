-- All cursors to the horizon, $1, recorded as what lay before the start: epoch 0.
with forgotten as (delete from progress),
moved as (
    update cursor
    set floor = $1, settled = '{}', anchor_position = null, anchor_id = null, epoch = epoch + 1,
        revision = revision + 1, takeovers = 0
    returning subscription, lane
)
insert into progress (subscription, lane, epoch, floor_from, floor_to)
select subscription, lane, 0, 0, $1 from moved where $1 > 0
