-- What is not to be delivered yet waits for its time.
insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
select
    ?1, e.position, ?3, ?4, ?5, case when e.deliver_at > ?6 then 'delayed' else 'pending' end, 0,
    max(coalesce(e.deliver_at, ?6), ?6), ?6
from pillarbox_event as e
where e.position = ?2
on conflict (subscription, position) do update set
    arrival = excluded.arrival, state = excluded.state, attempts = 0, due_at = excluded.due_at, died_at = null,
    owner = null, claim = null, claimed_at = null, ready_at = null
where state <> 'delayed'
