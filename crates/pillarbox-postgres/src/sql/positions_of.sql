select position from event where id = $1::uuid
union
select position from event_kept where id = $1
order by position
