select
    d.subscription,
    min(case when d.state not in ('delayed', 'dead') then coalesce(e.created_at, k.created_at, d.since) end),
    min(case when d.state = 'retrying' then d.due_at end)
from pillarbox_delivery as d
left join pillarbox_event as e on e.position = d.position
left join pillarbox_event_kept as k on k.position = d.position
group by d.subscription
