select id, host, pid, version, started_at, beat_at, subscriptions, report
from pillarbox_instance
order by id
