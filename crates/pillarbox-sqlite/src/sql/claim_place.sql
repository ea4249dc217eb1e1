-- A delayed one that is due stands behind what its key has.
update pillarbox_delivery
set state = 'pending',
    arrival = (select max(arrival) + 1 from pillarbox_delivery where subscription = ?1 and lane = ?3)
where subscription = ?1 and position = ?2
