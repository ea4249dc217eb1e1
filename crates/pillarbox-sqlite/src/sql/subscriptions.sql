select id, name, filter, mode, on_dead, hold_ms, paused
from pillarbox_subscription
order by name
