-- Removes those of the next $2 copies above $1 that no delivery needs: how many copies were looked at, the last of them, and how many went.
with looked as materialized (
    select position from event_kept where position > $1::bigint order by position limit $2::bigint
), gone as (
    delete from event_kept as k
    using looked as l
    where k.position = l.position
        -- Each by itself, subscription by subscription. Not as an anti join, which might read all deliveries.
        and (
            select true
            from subscription as s
            cross join lateral (
                select from delivery as d where d.subscription = s.id and d.position = l.position offset 0
            ) as needed
            limit 1
        ) is null
    returning k.position
)
select (select count(*) from looked), (select max(position) from looked), (select count(*) from gone)
