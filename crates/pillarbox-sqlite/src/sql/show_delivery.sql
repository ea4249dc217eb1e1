select state, attempts, due_at, since, errors
from pillarbox_delivery_state
where subscription = ?1 and position = ?2
