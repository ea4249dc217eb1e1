update pillarbox_cursor
set floor = ?1, settled = '', anchor_position = null, anchor_id = null, epoch = epoch + 1,
    revision = revision + 1, takeovers = 0
