-- The next ?2 copies above ?1: how many there are, and the last of them.
select count(*), max(position)
from (select position from pillarbox_event_kept where position > ?1 order by position limit ?2)
