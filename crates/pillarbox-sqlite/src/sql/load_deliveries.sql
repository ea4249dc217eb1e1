select position, key, arrival, state, attempts, due_at, since
from pillarbox_delivery
where subscription = ?1 and lane = ?2
order by arrival, position
