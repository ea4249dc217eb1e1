-- The next $3 keys above $2 with a row that stands in line, one look at the index for each.
with recursive k (key, number) as (
    (
        select d.key, 1
        from delivery as d
        where d.subscription = $1::bigint and d.key > $2::text and d.state in ('pending', 'retrying', 'processing')
        order by d.key
        limit 1
    )
    union all
    select n.key, k.number + 1
    from k
    cross join lateral (
        select d.key
        from delivery as d
        where d.subscription = $1 and d.key > k.key and d.state in ('pending', 'retrying', 'processing')
        order by d.key
        limit 1
    ) as n
    where k.number < $3::integer
)
select key from k order by number
