select id, name, filter, mode, on_dead, hold_ms, paused, paused_by, paused_reason, retry, definition
from subscription
order by name collate "C"
