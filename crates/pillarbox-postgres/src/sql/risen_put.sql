insert into delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since)
values (
    $1::bigint, $2::bigint, $3::integer,
    (select coalesce(max(arrival), 0) + 1 from delivery where subscription = $1 and lane = $3),
    $4::text, $5::text, 0, $6::timestamptz, clock_timestamp()
)
on conflict (subscription, position) do nothing
