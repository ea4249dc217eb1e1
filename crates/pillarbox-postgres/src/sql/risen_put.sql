-- $7: it is a queue.
insert into delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, queued, ready_at)
values (
    $1::bigint, $2::bigint, $3::integer,
    case
        when $7::boolean then nextval('delivery_arrival_seq')
        else (select coalesce(max(arrival), 0) + 1 from delivery where subscription = $1 and lane = $3 and not queued)
    end,
    $4::text, $5::text, 0, $6::timestamptz, clock_timestamp(), $7,
    case when $7 and $4 is null and $5 <> 'delayed' then $6 end
)
on conflict (subscription, position) do nothing
