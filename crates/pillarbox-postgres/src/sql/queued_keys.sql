-- The keys of queues with a row that the owner of their lane must not overtake, up to $2 and one more of each queue; see claim_keys.sql.
with recursive k (subscription, key, number) as (
    select s.id, ''::text, 0
    from subscription as s
    where s.id = any ($1::bigint[]) and s.mode = 'queue'
    union all
    select k.subscription, n.key, k.number + 1
    from k
    cross join lateral (
        select least(
            (
                select d.key
                from delivery as d
                where d.subscription = k.subscription and d.key > k.key and d.state in ('pending', 'retrying', 'processing')
                order by d.key
                limit 1
            ),
            (
                select d.key from delivery as d where d.subscription = k.subscription and d.key > k.key and d.state = 'delayed'
                order by d.key limit 1
            ),
            (
                select d.key from delivery as d where d.subscription = k.subscription and d.key > k.key and d.state = 'dead'
                order by d.key limit 1
            )
        )
        -- Keeps it from being computed twice.
        offset 0
    ) as n (key)
    where k.number <= $2::integer and n.key is not null
)
select subscription, key from k where number > 0
