-- Events at positions that were proven dead, in ranges that begin at $2 or above and below $3.
select e.position, e.topic, e.type, e.key, e.deliver_at, e.created_at, coalesce(e.id, event_id(e.position, e.created_at))
from dead_range as r
cross join lateral (select * from event where position >= r.low and position <= r.high) as e
where r.low >= $2::bigint and r.low < $3::bigint
limit $1::bigint
