-- Claims that an operator takes: of subscription $1, of instance $2, of owners that have been silent for $3 milliseconds; null and 0:
-- whichever.
select d.subscription, d.position, d.key, d.attempts, d.due_at, d.since, d.errors, s.retry, 'operator', clock_timestamp()
from delivery as d
join subscription as s on s.id = d.subscription
left join instance as i on i.id = d.owner
where d.owner is not null and ($1::bigint is null or d.subscription = $1) and ($2::bigint is null or d.owner = $2)
    and ($3::bigint = 0 or i.id is null or i.beat_at < clock_timestamp() - interval '1 millisecond' * $3)
order by d.subscription, d.position
for update of d
