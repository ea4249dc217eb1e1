-- With whether the subscription $3 has a row for it.
select
    e.position, coalesce(e.id, event_id(e.position, e.created_at)), e.topic, e.type,
    exists (select from delivery as d where d.subscription = $3::bigint and d.position = e.position)
from event as e
where e.position > $1::bigint and e.key = $2::text
order by e.position
