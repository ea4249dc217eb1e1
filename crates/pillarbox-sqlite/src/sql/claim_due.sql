select position, key, lane, due_at
from pillarbox_delivery
where subscription = ?1 and state = 'delayed' and due_at <= ?2
order by due_at, position
limit ?3
