select coalesce(e.id, k.id, event_id(e.position, e.created_at))
from journal as j
left join event as e on e.position = j.position
left join event_kept as k on k.position = j.position
where j.stream = $1::text and j.version = $2::bigint and (e.position is not null or k.position is not null)
