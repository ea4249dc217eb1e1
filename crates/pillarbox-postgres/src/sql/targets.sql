-- Deliveries of the positions $2 in whatever state; or what is dead, of the key $3 or all of it. In log order, by the index that serves.
select d.position, d.lane, coalesce(e.id, k.id, event_id(e.position, e.created_at)), d.key
from (
    (
        select t.position, t.lane, t.key
        from delivery as t
        where t.subscription = $1::bigint and t.position = any($2::bigint[])
    )
    union all
    (
        select t.position, t.lane, t.key
        from delivery as t
        where $2 is null and $3::text is not null and t.subscription = $1 and t.key = $3 and t.state = 'dead'
    )
    union all
    (
        select t.position, t.lane, t.key
        from delivery as t
        where $2 is null and $3 is null and t.subscription = $1 and t.state = 'dead'
        order by t.position
        limit $4::bigint
    )
) as d
left join event as e on e.position = d.position
left join event_kept as k on k.position = d.position
order by d.position
limit $4
