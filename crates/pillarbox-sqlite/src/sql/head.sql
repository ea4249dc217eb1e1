select coalesce(e.id, k.id), head.position, head.state
from pillarbox_delivery as d
join pillarbox_subscription as s on s.id = d.subscription
join pillarbox_delivery as head
    on head.subscription = d.subscription and head.key = d.key and head.arrival < d.arrival
left join pillarbox_event as e on e.position = head.position
left join pillarbox_event_kept as k on k.position = head.position
where d.subscription = ?1 and d.position = ?2
    and head.state <> 'delayed' and (head.state <> 'dead' or s.on_dead = 'block')
order by head.arrival
limit 1
