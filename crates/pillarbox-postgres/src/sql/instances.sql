select id, host, pid, version, started_at, beat_at, subscriptions, report
from instance
order by id
