insert into subscription (name, filter, mode, lanes, on_dead, hold_ms, retry, processing_timeout_ms, defined_by)
select n.name, n.filter, n.mode, n.lanes, n.on_dead, n.hold_ms, n.retry, n.processing_timeout_ms, $9::bigint
from unnest($1::text[], $2::text[], $3::text[], $4::integer[], $5::text[], $6::bigint[], $7::text[], $8::bigint[])
    with ordinality
    as n (name, filter, mode, lanes, on_dead, hold_ms, retry, processing_timeout_ms, ordinal)
order by n.ordinal
-- Another relay may have been faster; its row is found when its transaction has ended.
on conflict (name) do nothing
returning id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms, mode, hold_ms
