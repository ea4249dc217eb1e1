select position from pillarbox_event where id in (?1, upper(?1))
union
select position from pillarbox_event_kept where id in (?1, upper(?1))
order by position
