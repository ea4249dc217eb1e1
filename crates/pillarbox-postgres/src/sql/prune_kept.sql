delete from event_kept
where position in (
    select k.position
    from event_kept as k
    where not exists (select from delivery as d where d.position = k.position)
    limit $1::bigint
)
