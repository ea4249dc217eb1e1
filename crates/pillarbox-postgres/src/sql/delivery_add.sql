-- As delivery_put.sql, where an operator's word is newer than what is there.
insert into delivery (subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at)
select w.*, case w.state when 'dead' then clock_timestamp() end
from unnest($1::bigint[], $2::bigint[], $3::integer[], $4::bigint[], $5::text[], $6::text[], $7::integer[],
    $8::timestamptz[], $9::timestamptz[]) as w (subscription, position, lane, arrival, key, state, attempts, due_at, since)
on conflict (subscription, position) do nothing
returning subscription, position
