-- From the copies on, of which few lie above a place that is in the log.
select d.position, d.lane, k.id, d.key
from pillarbox_event_kept as k
cross join pillarbox_delivery as d on d.subscription = ?1 and d.position = k.position
where k.position > ?2 and (?3 is null or d.key = ?3) and d.state <> 'delayed'
    and not exists (select 1 from pillarbox_event as e where e.position = d.position)
order by d.position
