select coalesce(e.id, k.id), head.position, head.state
from delivery as d
join subscription as s on s.id = d.subscription
join delivery as head on head.subscription = d.subscription and head.key = d.key and head.arrival < d.arrival
left join event as e on e.position = head.position
left join event_kept as k on k.position = head.position
where d.subscription = $1::bigint and d.position = $2::bigint
    and head.state <> 'delayed' and (head.state <> 'dead' or s.on_dead = 'block')
order by head.arrival
limit 1
