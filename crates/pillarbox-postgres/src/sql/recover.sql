-- Claims of those who will not end them any more. Who ends them at this moment is left alone.
select d.subscription, d.position, d.key, d.attempts, d.due_at, d.since, d.errors, s.retry, c.cause, clock_timestamp()
from delivery as d
join subscription as s on s.id = d.subscription
left join instance as i on i.id = d.owner
left join unnest($1::integer[], $2::text[], $3::bigint[]) as w (owner, cause, beat) on w.owner = d.owner
cross join lateral (
    select case
        when w.cause = 'lease' and i.beat <> w.beat then null
        when w.cause is not null then w.cause
        when not $4::boolean then null
        when i.id is null then 'crash'
        when i.beat_at < clock_timestamp() - interval '1 millisecond' * s.processing_timeout_ms then 'timeout'
    end
) as c (cause)
where d.owner is not null and c.cause is not null
for update of d skip locked
