delete from pillarbox_delivery
where subscription = ?1 and position > ?2
    and exists (select 1 from pillarbox_event as e where e.position = pillarbox_delivery.position)
