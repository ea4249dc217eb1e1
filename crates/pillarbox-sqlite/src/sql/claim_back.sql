update pillarbox_delivery
set state = case when attempts > 0 then 'retrying' else 'pending' end, due_at = min(due_at, ?5),
    owner = null, claim = null, claimed_at = null
where subscription = ?1 and position = ?2 and owner = ?3 and claim = ?4
returning key
