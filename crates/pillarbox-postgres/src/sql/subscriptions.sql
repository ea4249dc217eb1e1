select id, name, filter, mode, on_dead, hold_ms, paused
from subscription
order by name collate "C"
