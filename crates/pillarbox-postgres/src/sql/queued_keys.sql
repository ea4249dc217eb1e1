-- The keys of queues with a row that the owner of their lane must not overtake, and whether some are left out, since there are more than $2
-- rows of a kind. All are read once in the order of their keys. Who looks from key to key passes over what others add meanwhile, and this
-- snapshot does not show, again with every key.
select s.id, k.key, k.more
from subscription as s
cross join lateral (
    with line as (
        select d.key
        from delivery as d
        where d.subscription = s.id and d.key > '' and d.state in ('pending', 'retrying', 'processing')
        order by d.key
        limit $2::integer + 1
    ),
    later as (
        select d.key from delivery as d where d.subscription = s.id and d.key > '' and d.state = 'delayed' order by d.key limit $2 + 1
    ),
    dead as (
        select d.key from delivery as d where d.subscription = s.id and d.key > '' and d.state = 'dead' order by d.key limit $2 + 1
    ),
    figures as (
        select (select count(*) from line) > $2 or (select count(*) from later) > $2 or (select count(*) from dead) > $2 as more
    )
    select u.key, f.more
    from (select key from line union all select key from later union all select key from dead) as u
    cross join figures as f
    group by u.key, f.more
) as k
where s.id = any ($1::bigint[]) and s.mode = 'queue'
