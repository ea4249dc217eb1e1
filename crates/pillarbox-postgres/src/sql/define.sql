insert into subscription (name, filter, mode, lanes, on_dead, hold_ms, retry, processing_timeout_ms, defined_by)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
-- Another relay may have been faster; its row is found when its transaction has ended.
on conflict (name) do nothing
returning id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms, mode, hold_ms
