select
    d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since, d.subscription, d.owner, d.claim,
    s.retry, s.processing_timeout_ms, i.beat, i.beat_at
from pillarbox_delivery as d indexed by pillarbox_delivery_owner
join pillarbox_subscription as s on s.id = d.subscription
left join pillarbox_instance as i on i.id = d.owner
where d.owner is not null
order by d.subscription, d.arrival
