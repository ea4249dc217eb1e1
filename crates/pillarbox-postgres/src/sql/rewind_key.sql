insert into delivery as d (subscription, position, lane, arrival, key, state, attempts, due_at, since)
select $1::bigint, e.position, $3::integer, $4::bigint + e.number, $5::text, 'pending', 0, clock_timestamp(), clock_timestamp()
from unnest($2::bigint[]) with ordinality as e (position, number)
on conflict (subscription, position) do update set
    arrival = excluded.arrival, state = 'pending', attempts = 0, due_at = excluded.due_at, died_at = null
where d.state <> 'delayed'
