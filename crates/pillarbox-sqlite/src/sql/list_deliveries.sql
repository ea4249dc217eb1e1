-- Deliveries of subscription ?1 in log order. What is chosen gives the positions that are looked at, by the index that serves.
select
    d.position, coalesce(e.topic, k.topic), coalesce(e.type, k.type), d.key, coalesce(e.deliver_at, k.deliver_at),
    coalesce(e.created_at, k.created_at, d.since), coalesce(e.id, k.id), coalesce(e.headers, k.headers, '{}'),
    d.state, d.attempts, d.due_at, d.errors, d.owner, d.claimed_at, i.beat_at
from (@rows@) as chosen
cross join pillarbox_delivery_state as d on d.subscription = ?1 and d.position = chosen.position
left join pillarbox_event as e on e.position = d.position
left join pillarbox_event_kept as k on k.position = d.position
left join pillarbox_instance as i on i.id = d.owner
where (?2 is null or d.state = ?2) and (?3 is null or d.key = ?3)
order by chosen.position
