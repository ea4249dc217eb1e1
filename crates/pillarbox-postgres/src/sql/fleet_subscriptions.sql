select id, name, filter, lanes, paused, definition, on_dead, retry, processing_timeout_ms from subscription order by id
