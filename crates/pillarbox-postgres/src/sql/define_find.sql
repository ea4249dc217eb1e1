select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms, mode, hold_ms
from subscription
where name = $1
for update
