-- $6: it is a queue. What is not to be delivered yet waits for its time. Each event is looked up by its position, also where the planner knows
-- little of the log.
insert into delivery as d (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued)
select
    $1::bigint, r.position, $3::integer, case when $6::boolean then nextval('delivery_arrival_seq') else $4::bigint + r.number end,
    $5::text, case when e.deliver_at > clock_timestamp() then 'delayed' else 'pending' end, 0,
    greatest(e.deliver_at, clock_timestamp()), clock_timestamp(), $6
from unnest($2::bigint[]) with ordinality as r (position, number)
cross join lateral (select deliver_at from event where event.position = r.position offset 0) as e
on conflict (subscription, position) do update set
    arrival = excluded.arrival, state = excluded.state, attempts = 0, due_at = excluded.due_at, died_at = null, owner = null,
    claim = null, claimed_at = null, ready_at = null
where d.state <> 'delayed'
