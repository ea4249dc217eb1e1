select position, key, arrival, state, attempts, due_at, since, crashes, claim
from pillarbox_delivery
where owner = ?1 and subscription = ?2 and claim >= ?3 and claim < ?4
order by claim
