-- The next $2 dead ranges below $1, the newest first: how many, where the last one begins, and whether any has an event.
with looked as materialized (
    select low, high from dead_range where low < $1::bigint order by low desc limit $2::bigint
)
select
    (select count(*) from looked),
    (select min(low) from looked),
    exists (
        select
        from looked as r
        -- For each by itself, by the index of its leaf.
        cross join lateral (
            select from event as e where e.position >= r.low and e.position <= r.high order by e.position limit 1
        ) as e
    )
