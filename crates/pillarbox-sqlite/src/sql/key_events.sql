-- With whether the subscription ?3 has a row for it.
select
    e.position, e.id, e.topic, e.type,
    exists (select 1 from pillarbox_delivery as d where d.subscription = ?3 and d.position = e.position)
from pillarbox_event as e
where e.position > ?1 and e.key = ?2
order by e.position
