select id, name, filter, mode, on_dead, hold_ms, paused, start_floor
from pillarbox_subscription
order by name
