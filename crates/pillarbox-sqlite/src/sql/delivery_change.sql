update pillarbox_delivery
set arrival = ?3, state = ?4, attempts = ?5, due_at = ?6, since = ?7
where subscription = ?1 and position = ?2
