select a.position, a.id
from unnest($1::bigint[], $2::uuid[]) as a (position, id)
where not exists (
    select from event as e where e.position = a.position and coalesce(e.id, event_id(e.position, e.created_at)) = a.id
)
limit 1
