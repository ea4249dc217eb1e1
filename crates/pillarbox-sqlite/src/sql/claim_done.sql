delete from pillarbox_delivery
where subscription = ?1 and position = ?2 and owner = ?3 and claim = ?4
returning key
