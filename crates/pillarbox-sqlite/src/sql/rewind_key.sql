insert into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
values (?1, ?2, ?3, ?4, ?5, 'pending', 0, ?6, ?6)
on conflict (subscription, position) do update set
    arrival = excluded.arrival, state = 'pending', attempts = 0, due_at = excluded.due_at, died_at = null,
    owner = null, claim = null, claimed_at = null, ready_at = null
where state <> 'delayed'
