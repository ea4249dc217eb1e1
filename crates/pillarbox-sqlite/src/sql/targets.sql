-- Deliveries of the positions ?2 in whatever state; or what is dead, of the key ?3 or all of it. In log order, by the index that serves.
select d.position, d.lane, coalesce(e.id, k.id), d.key
from (
    select * from (
        select position, lane, key
        from pillarbox_delivery
        where ?2 is not null and subscription = ?1 and position in (select value from json_each(?2))
    )
    union all
    select * from (
        select position, lane, key
        from pillarbox_delivery indexed by pillarbox_delivery_key
        where ?2 is null and ?3 is not null and subscription = ?1 and key = ?3 and state = 'dead'
    )
    union all
    select * from (
        select position, lane, key
        from pillarbox_delivery indexed by pillarbox_delivery_by_state
        where ?2 is null and ?3 is null and subscription = ?1 and state = 'dead'
        order by position
        limit ?4
    )
) as d
left join pillarbox_event as e on e.position = d.position
left join pillarbox_event_kept as k on k.position = d.position
order by d.position
limit ?4
