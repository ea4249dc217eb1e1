-- As delivery_put.sql, where an operator's word is newer than what is there. What the stored cursor has settled was put before, by a
-- settlement that was not answered: the operator may have given it up since.
insert into delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, errors, died_at)
select
    w.subscription, w.position, w.lane, w.arrival, w.key, w.state, w.attempts, w.due_at, w.since, w.errors,
    case w.state when 'dead' then clock_timestamp() end
from unnest($1::bigint[], $2::bigint[], $3::integer[], $4::bigint[], $5::text[], $6::text[], $7::integer[],
    $8::timestamptz[], $9::timestamptz[], $10::text[], $11::bigint[], $12::bigint[])
    as w (subscription, position, lane, arrival, key, state, attempts, due_at, since, errors, epoch, revision)
join cursor as c
    on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch and c.revision <> w.revision
where w.position > c.floor and not c.settled @> w.position
on conflict (subscription, position) do nothing
