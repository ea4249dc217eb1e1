delete from pillarbox_event
where position > ?1 and position <= ?2 and stream_version is null
