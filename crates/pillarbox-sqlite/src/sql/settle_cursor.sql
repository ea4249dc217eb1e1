update pillarbox_cursor
set floor = ?4, settled = ?5, anchor_position = ?6, anchor_id = ?7,
    takeovers = case when ?9 then 0 else takeovers end,
    owner = case when ?8 then null else owner end
where subscription = ?1 and lane = ?2 and epoch = ?3
