delete from event_kept
where position in (
    select k.position
    from event_kept as k
    where not exists (
        select from subscription as s join delivery as d on d.subscription = s.id and d.position = k.position
    )
    limit $1::bigint
)
