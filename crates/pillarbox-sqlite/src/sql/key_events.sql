select position, id, topic, type
from pillarbox_event
where position > ?1 and key = ?2
order by position
