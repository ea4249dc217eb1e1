select distinct e.position, e.topic, e.type, e.key, e.deliver_at, e.created_at
from pillarbox_dead_range as r
cross join pillarbox_event as e
where e.position >= r.low and e.position <= r.high
order by e.position
limit ?1
