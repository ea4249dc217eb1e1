-- The next $3 keys above $2 with a row that the owner of their lane must not overtake: what stands in line, what is delayed, and what
-- is dead, which an operator may call back at any time. A few looks at an index for each key.
with recursive k (key, number) as (
    select $2::text, 0
    union all
    select n.key, k.number + 1
    from k
    cross join lateral (
        select least(
            (
                select d.key
                from delivery as d
                where d.subscription = $1::bigint and d.key > k.key and d.state in ('pending', 'retrying', 'processing')
                order by d.key
                limit 1
            ),
            (
                select d.key from delivery as d where d.subscription = $1 and d.key > k.key and d.state = 'delayed'
                order by d.key limit 1
            ),
            (
                select d.key from delivery as d where d.subscription = $1 and d.key > k.key and d.state = 'dead'
                order by d.key limit 1
            )
        )
        -- Keeps it from being computed twice.
        offset 0
    ) as n (key)
    where k.number < $3::integer and n.key is not null
)
select key from k where number > 0 order by number
