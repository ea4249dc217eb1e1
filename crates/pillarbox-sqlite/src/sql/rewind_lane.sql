update pillarbox_cursor
set floor = ?3, settled = ?4, anchor_position = null, anchor_id = null, epoch = epoch + 1, revision = revision + 1
where subscription = ?1 and lane = ?2 and epoch = ?5
