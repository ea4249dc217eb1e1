-- Positions that are proven to be closed.

-- name: put
insert into pillarbox_dead_range (low, high, closed_at) values (?1, ?2, ?3)
on conflict (low) do update set high = max(high, excluded.high)

-- name: has
select 1 from pillarbox_dead_range where low <= ?1 and high >= ?1

-- name: ranges
select low, high from pillarbox_dead_range order by low

-- name: risen
select distinct e.position, e.topic, e.type, e.key, e.deliver_at, e.created_at
from pillarbox_dead_range as r
cross join pillarbox_event as e
where e.position >= r.low and e.position <= r.high
order by e.position
limit ?1

-- name: take_out
delete from pillarbox_dead_range where low <= ?2 and high >= ?1 returning low, high, closed_at
