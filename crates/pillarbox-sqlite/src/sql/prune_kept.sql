delete from pillarbox_event_kept
where position in (
    select k.position
    from pillarbox_event_kept as k
    where not exists (select 1 from pillarbox_delivery as d where d.position = k.position)
    limit ?1
)
