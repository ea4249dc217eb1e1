select count(*) from (select 1 from pillarbox_event_kept limit ?1)
