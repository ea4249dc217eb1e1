insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, errors)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, '[]')
on conflict (subscription, position) do update set
    lane = excluded.lane, arrival = excluded.arrival, key = excluded.key, state = excluded.state,
    attempts = excluded.attempts, due_at = excluded.due_at, since = excluded.since, errors = excluded.errors
