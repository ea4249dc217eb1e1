select id from pillarbox_event where key = ?1 and stream_version = ?2
union all
select id from pillarbox_event_kept where key = ?1 and stream_version = ?2
limit 1
