-- Events at positions that were proven dead.
select e.position, e.topic, e.type, e.key, e.deliver_at, e.created_at, e.id
from dead_range as r
cross join lateral (select * from event where position >= r.low and position <= r.high) as e
limit $1::bigint
