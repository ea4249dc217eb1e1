insert or ignore into pillarbox_delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
values (
    ?1, ?2, ?3,
    (select coalesce(max(arrival), 0) + 1 from pillarbox_delivery where subscription = ?1 and lane = ?3),
    ?4, ?5, 0, ?6, ?7
)
