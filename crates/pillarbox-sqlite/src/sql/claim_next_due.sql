select min(due_at)
from (
    select min(ready_at) as due_at from pillarbox_delivery where subscription = ?1 and ready_at > ?2
    union all
    select min(due_at) from pillarbox_delivery where subscription = ?1 and state = 'delayed'
)
