update pillarbox_delivery
set arrival = ?3, state = ?4, attempts = ?5, due_at = ?6, since = ?7,
    died_at = case ?4 when 'dead' then coalesce(died_at, ?8) end
where subscription = ?1 and position = ?2
