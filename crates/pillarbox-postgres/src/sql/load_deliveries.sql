select w.ordinal, d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since
from unnest($1::bigint[], $2::integer[]) with ordinality as w (subscription, lane, ordinal)
join delivery as d on d.subscription = w.subscription and d.lane = w.lane and not d.queued
order by w.ordinal, d.arrival, d.position
