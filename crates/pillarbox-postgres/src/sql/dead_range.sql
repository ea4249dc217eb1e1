-- Positions that are proven to be closed.

-- name: close
-- What retention has removed is not dead.
insert into dead_range (low, high)
select greatest(w.low, m.pruned_to + 1), w.high
from unnest($1::bigint[], $2::bigint[]) as w (low, high), meta as m
where w.high > m.pruned_to
on conflict (low) do update set high = greatest(dead_range.high, excluded.high)

-- name: has
select exists (select from dead_range where low <= $1 and high >= $1)

-- name: ranges
select 0::bigint as subscription, 0 as lane, low, high from dead_range order by low

-- name: above
select low, high from dead_range where high > $1 order by low

-- name: within
select low, high from dead_range where high >= $1 and low <= $2

-- name: above_within
select low, high from dead_range where high > $1 and low <= $2

-- name: look
-- The next $2 dead ranges below $1, the newest first: how many, where the last one begins, and whether any has an event.
with looked as materialized (
    select low, high from dead_range where low < $1::bigint order by low desc limit $2::bigint
)
select
    (select count(*) from looked) as ranges,
    (select min(low) from looked) as first,
    exists (
        select
        from looked as r
        -- For each by itself, by the index of its leaf.
        cross join lateral (
            select from event as e where e.position >= r.low and e.position <= r.high order by e.position limit 1
        ) as e
    ) as found

-- name: risen
-- Events at positions that were closed, in ranges that begin at $2 or above and below $3.
select e.position, e.topic, e.type, e.key, e.deliver_at, e.created_at, coalesce(e.id, event_id(e.position, e.created_at)) as id
from dead_range as r
cross join lateral (select * from event where position >= r.low and position <= r.high) as e
where r.low >= $2::bigint and r.low < $3::bigint
limit $1::bigint

-- name: take_out
-- Takes $1 to $2 out of the dead ranges.
with gone as (
    delete from dead_range where low <= $2::bigint and high >= $1::bigint returning low, high, closed_at
)
insert into dead_range as r (low, high, closed_at)
select part.low, part.high, gone.closed_at
from gone
cross join lateral (values (gone.low, $1 - 1), ($2 + 1, gone.high)) as part (low, high)
where part.low <= part.high
on conflict (low) do update set high = greatest(r.high, excluded.high)
