insert into pillarbox_subscription (
    name, filter, mode, lanes, on_dead, hold_ms, retry, processing_timeout_ms, defined_by, created_at
)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
on conflict (name) do update set
    filter = excluded.filter,
    on_dead = excluded.on_dead,
    hold_ms = excluded.hold_ms,
    retry = excluded.retry,
    processing_timeout_ms = excluded.processing_timeout_ms,
    defined_by = excluded.defined_by,
    definition = definition + 1
