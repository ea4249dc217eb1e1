-- Positions that are proven to be closed.

-- name: put
insert into pillarbox_dead_range (low, high, closed_at) values (?1, ?2, ?3)
on conflict (low) do update set high = max(high, excluded.high)

-- name: has
select 1 from pillarbox_dead_range where low <= ?1 and high >= ?1

-- name: ranges
select low, high from pillarbox_dead_range order by low

-- name: looked_at
-- Retention looks at the ranges below this position next.
select value from pillarbox_meta where name = 'dead_looked_at'

-- name: look
-- The next ?2 dead ranges below ?1, the newest first: how many, and where the last one begins.
select count(*) as ranges, min(low) as first
from (select low from pillarbox_dead_range where low < ?1 order by low desc limit ?2)

-- name: risen
-- Events at positions that were closed, in ranges that begin at ?2 or above and below ?3.
select distinct e.position, e.topic, e.type, e.key, e.deliver_at, e.created_at
from pillarbox_dead_range as r
cross join pillarbox_event as e
where r.low >= ?2 and r.low < ?3 and e.position >= r.low and e.position <= r.high
order by e.position
limit ?1

-- name: take_out
delete from pillarbox_dead_range where low <= ?2 and high >= ?1 returning low, high, closed_at
