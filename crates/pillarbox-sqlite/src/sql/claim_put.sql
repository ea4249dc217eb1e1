update pillarbox_delivery
set state = 'processing', owner = ?3, claim = ?4, claimed_at = ?5, ready_at = null
where subscription = ?1 and position = ?2
