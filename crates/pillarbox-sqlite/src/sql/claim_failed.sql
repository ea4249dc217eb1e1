update pillarbox_delivery
set state = ?5, attempts = ?6, due_at = ?7, died_at = case ?5 when 'dead' then ?8 end,
    owner = null, claim = null, claimed_at = null
where subscription = ?1 and position = ?2 and owner = ?3 and claim = ?4
returning key
