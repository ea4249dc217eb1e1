update pillarbox_progress
set floor_to = ?5, ended_at = ?6
where id = (select max(id) from pillarbox_progress where subscription = ?1 and lane = ?2)
    and epoch = ?3 and floor_to = ?4 and started_at > ?6 - ?7
