insert into recovery as r (subscription, cause, count, last_at)
select w.subscription, w.cause, w.count, clock_timestamp()
from unnest($1::bigint[], $2::text[], $3::bigint[]) as w (subscription, cause, count)
order by w.subscription, w.cause
on conflict (subscription, cause) do update set count = r.count + excluded.count, last_at = excluded.last_at
