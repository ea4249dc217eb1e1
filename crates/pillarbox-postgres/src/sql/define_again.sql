update subscription
set filter = $2, on_dead = $3, hold_ms = $4, retry = $5, processing_timeout_ms = $6, defined_by = $7, definition = definition + 1
where id = $1
returning id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms, mode, hold_ms
