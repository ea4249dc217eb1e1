select d.state, d.attempts, d.due_at, d.since, d.errors, d.owner, d.claimed_at, i.beat_at
from delivery_state as d
left join instance as i on i.id = d.owner
where d.subscription = $1::bigint and d.position = $2::bigint
