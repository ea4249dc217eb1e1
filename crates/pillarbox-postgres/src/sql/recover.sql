-- Claims of those who will not end them any more. Who ends them at this moment is left alone. First the claims are looked through, by the
-- index of owners (`offset 0`: as a join, some plans read all deliveries); then what is chosen is locked, if it is still the same claim.
with chosen as materialized (
    select h.subscription, h.position, h.owner, h.claim, s.retry, c.cause
    from (select d.subscription, d.position, d.owner, d.claim from delivery as d where d.owner is not null offset 0) as h
    join subscription as s on s.id = h.subscription
    left join instance as i on i.id = h.owner
    left join unnest($1::integer[], $2::text[], $3::bigint[]) as w (owner, cause, beat) on w.owner = h.owner
    cross join lateral (
        select case
            when w.cause = 'lease' and i.beat <> w.beat then null
            when w.cause is not null then w.cause
            when not $4::boolean then null
            when i.id is null then 'crash'
            when i.beat_at < clock_timestamp() - interval '1 millisecond' * s.processing_timeout_ms then 'timeout'
        end
    ) as c (cause)
    where c.cause is not null
)
select d.subscription, d.position, d.key, d.attempts, d.due_at, d.since, d.errors, c.retry, c.cause, clock_timestamp()
from chosen as c
cross join lateral (
    select * from delivery as r where r.subscription = c.subscription and r.position = c.position
    offset 0
    for update skip locked
) as d
where d.owner = c.owner and d.claim = c.claim
