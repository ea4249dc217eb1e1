-- In the order of their names, as everybody locks them.
select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms, mode, hold_ms
from subscription
where name = any ($1::text[])
order by name collate "C"
for update
