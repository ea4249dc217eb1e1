-- How many deliveries of a queue wait or are worked on. What is dead waits for nothing, however much there is of it.
select
    (
        select count(*)
        from delivery as d
        where d.subscription = $1 and d.state in ('pending', 'retrying', 'processing')
    ) + (
        select coalesce(sum(c.change), 0)::bigint
        from aside_count as c
        where c.subscription = $1 and c.state = 'delayed'
    )
