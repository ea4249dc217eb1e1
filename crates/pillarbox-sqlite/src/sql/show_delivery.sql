select d.state, d.attempts, d.due_at, d.since, d.errors, d.owner, d.claimed_at, i.beat_at
from pillarbox_delivery_state as d
left join pillarbox_instance as i on i.id = d.owner
where d.subscription = ?1 and d.position = ?2
