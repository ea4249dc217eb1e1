select position, topic, type, key, deliver_at, created_at, id, headers
from pillarbox_event
where position > ?1
order by position
limit ?2
