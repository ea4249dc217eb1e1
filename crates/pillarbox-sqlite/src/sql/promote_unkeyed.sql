update pillarbox_delivery
set ready_at = max(due_at, ?3)
where subscription = ?1 and position = ?2 and ready_at is null and state in ('pending', 'retrying')
