-- Deliveries that are still there: an operator may have skipped one. $12 errors are kept. Each is looked up by the primary key, as
-- claim_end.sql says.
update delivery as d
set arrival = w.arrival, state = w.state, attempts = w.attempts, due_at = w.due_at, since = w.since,
    died_at = case w.state when 'dead' then coalesce(d.died_at, clock_timestamp()) end,
    errors = case
        when w.errors is null then d.errors
        else (
            select jsonb_agg(kept.error order by kept.number)::text
            from (
                select a.error, a.number, count(*) over () as count
                from jsonb_array_elements(d.errors::jsonb || w.errors::jsonb) with ordinality as a (error, number)
            ) as kept
            where kept.number > kept.count - $12::bigint
        )
    end
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[], $8::integer[],
    $9::timestamptz[], $10::timestamptz[], $11::text[])
    as w (subscription, lane, epoch, revision, position, arrival, state, attempts, due_at, since, errors)
join cursor as c
    on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch and c.revision = w.revision
where d.subscription = any (array[w.subscription]) and d.position = w.position
