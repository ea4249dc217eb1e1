select subscription, position, lane, key
from pillarbox_delivery
where died_at < ?1
order by died_at
limit ?2
