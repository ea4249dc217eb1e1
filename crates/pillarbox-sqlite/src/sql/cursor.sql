-- Cursors: what each lane has settled, who owns it, and under which epoch and revision.

-- name: fleet
select subscription, lane, owner, epoch, revision, takeovers from pillarbox_cursor order by 1, 2

-- name: lanes
select floor, settled, anchor_position, anchor_id, subscription, lane, owner, epoch, revision
from pillarbox_cursor
order by subscription, lane

-- name: take
-- An owner that was seen to stand still at a beat, and has beaten since, lives.
update pillarbox_cursor
set owner = ?4, epoch = epoch + 1, takeovers = takeovers + (owner is not null and owner <> ?4)
where subscription = ?1 and lane = ?2 and epoch = ?3
    and not exists (select 1 from pillarbox_instance where id = pillarbox_cursor.owner and beat <> ?5)
returning epoch

-- name: load
select floor, settled, anchor_position, anchor_id, takeovers, revision
from pillarbox_cursor
where subscription = ?1 and lane = ?2 and epoch = ?3

-- name: own_anchors
select floor, settled, anchor_position, anchor_id from pillarbox_cursor where owner = ?1

-- name: add
insert into pillarbox_cursor (subscription, lane, floor, epoch) values (?1, ?2, ?3, ?4)

-- name: replace
insert into pillarbox_cursor (subscription, lane, floor, epoch, revision) values (?1, ?2, ?3, ?4, ?5)

-- name: settled
select floor, settled from pillarbox_cursor where subscription = ?1 order by lane

-- name: settled_of
select floor, settled from pillarbox_cursor where subscription = ?1 and lane = ?2

-- name: at_epoch
-- The fence of a settlement.
select floor, revision, settled from pillarbox_cursor where subscription = ?1 and lane = ?2 and epoch = ?3

-- name: settle
update pillarbox_cursor
set floor = ?4, settled = ?5, anchor_position = ?6, anchor_id = ?7,
    takeovers = case when ?9 then 0 else takeovers end,
    owner = case when ?8 then null else owner end
where subscription = ?1 and lane = ?2 and epoch = ?3

-- name: touch
-- The owner loads the lane's deliveries again.
update pillarbox_cursor set revision = revision + 1 where subscription = ?1 and lane = ?2

-- name: fence
update pillarbox_cursor set epoch = epoch + 1 where subscription = ?1 and lane = ?2 and epoch = ?3

-- name: fence_all
update pillarbox_cursor set epoch = epoch + 1 where subscription = ?1

-- name: raise_epoch
-- The owner cannot settle any more and loads the lane again.
update pillarbox_cursor set epoch = epoch + 1 where subscription = ?1 and lane = ?2

-- name: rewind
update pillarbox_cursor
set floor = ?3, settled = ?4, anchor_position = null, anchor_id = null, epoch = epoch + 1, revision = revision + 1
where subscription = ?1 and lane = ?2 and epoch = ?5

-- name: jump
update pillarbox_cursor set floor = ?3, settled = ?4, epoch = epoch + 1 where subscription = ?1 and lane = ?2

-- name: give_back
update pillarbox_cursor set owner = null, epoch = epoch + 1 where owner = ?1
