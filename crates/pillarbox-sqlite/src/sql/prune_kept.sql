-- Removes those of the copies above ?1 and up to ?2 that no delivery needs.
delete from pillarbox_event_kept
where position > ?1 and position <= ?2
    and not exists (select 1 from pillarbox_delivery as d where d.position = pillarbox_event_kept.position)
