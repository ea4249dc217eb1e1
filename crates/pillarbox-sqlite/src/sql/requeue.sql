-- Whoever works on it has lost it.
update pillarbox_delivery
set state = 'pending', attempts = 0, due_at = ?3, died_at = null, owner = null, claim = null, claimed_at = null, ready_at = null
where subscription = ?1 and position = ?2
