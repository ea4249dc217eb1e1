select d.position, k.id
from pillarbox_delivery as d
join pillarbox_event_kept as k on k.position = d.position
where d.subscription = ?1 and d.position > ?2 and (?3 is null or d.key = ?3) and d.state <> 'delayed'
    and not exists (select 1 from pillarbox_event as e where e.position = d.position)
order by d.position
