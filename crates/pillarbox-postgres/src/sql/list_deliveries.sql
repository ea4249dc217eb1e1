-- Deliveries of subscription $1 in log order. @rows@ says which are looked at, so that an index serves, and $8 how many.
select
    d.position, coalesce(e.topic, k.topic, ''), coalesce(e.type, k.type, ''), d.key, coalesce(e.deliver_at, k.deliver_at),
    coalesce(e.created_at, k.created_at, d.since), coalesce(e.id, k.id, event_id(e.position, e.created_at)), d.state, d.attempts, d.due_at, d.errors,
    d.owner, d.claimed_at, i.beat_at
from (
    -- Of the table alone: a join would lose the order of the index.
    select d.position from delivery as d where d.subscription = $1::bigint @rows@ order by d.position limit $8::bigint
) as chosen
cross join lateral (
    select v.* from delivery_state as v where v.subscription = $1 and v.position = chosen.position offset 0
) as d
left join event as e on e.position = d.position
left join event_kept as k on k.position = d.position
left join instance as i on i.id = d.owner
where ($2::text is null or d.state = $2) and ($3::text is null or d.key = $3)
    and ($4::text is null or coalesce(e.topic, k.topic) = $4)
    and ($5::text is null or starts_with(coalesce(e.topic, k.topic), $5))
    and ($6::text is null or coalesce(e.headers, k.headers) ->> 'correlationid' = $6)
-- Which have this order: as soon as enough are found, no more are looked at.
order by chosen.position
limit $7::bigint
