-- What the events at these positions take in the table. Nothing of them is read from where large values lie.
select
    position,
    (coalesce(pg_column_size(payload), 0) + coalesce(pg_column_size(payload_bytes), 0) + coalesce(pg_column_size(headers), 0))::bigint
from event
where position = any($1)
union all
select
    position,
    (coalesce(pg_column_size(payload), 0) + coalesce(pg_column_size(payload_bytes), 0) + coalesce(pg_column_size(headers), 0))::bigint
from event_kept as k
where position = any($1) and not exists (select from event as e where e.position = k.position)
