select floor, settled, anchor_position, anchor_id, takeovers, revision
from pillarbox_cursor
where subscription = ?1 and lane = ?2 and epoch = ?3
