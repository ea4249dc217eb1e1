insert into pillarbox_delivery (
    subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, errors
)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, case ?6 when 'dead' then ?10 end, '[]')
on conflict (subscription, position) do update set
    lane = excluded.lane, arrival = excluded.arrival, key = excluded.key, state = excluded.state,
    attempts = excluded.attempts, due_at = excluded.due_at, since = excluded.since,
    died_at = excluded.died_at, errors = excluded.errors
where ?11
