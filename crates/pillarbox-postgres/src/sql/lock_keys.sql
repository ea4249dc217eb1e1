-- Nobody claims anything of the keys of these deliveries until the transaction ends.
select
from (
    select distinct r.position
    from (
        select distinct t.key
        from unnest($2::bigint[]) as w (position)
        cross join lateral (select t.key from delivery as t where t.subscription = $1::bigint and t.position = w.position offset 0) as t
    ) as k
    cross join lateral (
        select l.position
        from delivery as l
        where l.subscription = $1 and l.key = k.key and l.state in ('pending', 'retrying', 'processing')
        union all
        select l.position from delivery as l where l.subscription = $1 and l.key = k.key and l.state = 'delayed'
        union all
        select l.position from delivery as l where l.subscription = $1 and l.key = k.key and l.state = 'dead'
    ) as r
) as r
join delivery as d on d.subscription = $1 and d.position = r.position
where d.queued
order by d.position
for update of d
