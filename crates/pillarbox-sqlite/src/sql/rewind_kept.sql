update pillarbox_delivery
set state = 'pending', attempts = 0, due_at = ?3, died_at = null
where subscription = ?1 and position > ?2 and state <> 'delayed'
    and not exists (select 1 from pillarbox_event as e where e.position = pillarbox_delivery.position)
