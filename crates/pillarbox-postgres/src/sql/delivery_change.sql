update delivery as d
set arrival = w.arrival, state = w.state, attempts = w.attempts, due_at = w.due_at, since = w.since,
    died_at = case w.state when 'dead' then coalesce(d.died_at, clock_timestamp()) end,
    errors = coalesce(w.errors, d.errors)
from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::integer[], $6::timestamptz[], $7::timestamptz[], $8::text[])
    as w (subscription, position, arrival, state, attempts, due_at, since, errors)
where d.subscription = w.subscription and d.position = w.position
