-- Each is looked up by the primary key, as claim_end.sql says.
update delivery as d
set state = w.state, attempts = w.attempts, due_at = w.due_at, errors = w.errors, crashes = d.crashes + 1,
    ready_at = case when w.state <> 'dead' then greatest(w.due_at, clock_timestamp()) end,
    died_at = case w.state when 'dead' then clock_timestamp() end,
    owner = null, claim = null, claimed_at = null
from unnest($1::bigint[], $2::bigint[], $3::text[], $4::integer[], $5::timestamptz[], $6::text[])
    as w (subscription, position, state, attempts, due_at, errors)
where d.subscription = any (array[w.subscription]) and d.position = w.position
