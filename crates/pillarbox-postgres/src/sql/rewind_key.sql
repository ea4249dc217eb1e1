-- $6: it is a queue.
insert into delivery as d (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
select
    $1::bigint, e.position, $3::integer, case when $6::boolean then nextval('delivery_arrival_seq') else $4::bigint + e.number end,
    $5::text, 'pending', 0, clock_timestamp(), clock_timestamp(), $6
from unnest($2::bigint[]) with ordinality as e (position, number)
on conflict (subscription, position) do update set
    arrival = excluded.arrival, state = 'pending', attempts = 0, due_at = excluded.due_at, died_at = null, owner = null,
    claim = null, claimed_at = null, ready_at = null
where d.state <> 'delayed'
