-- Takes $1 to $2 out of the dead ranges.
with gone as (
    delete from dead_range where low <= $2::bigint and high >= $1::bigint returning low, high, closed_at
)
insert into dead_range as r (low, high, closed_at)
select part.low, part.high, gone.closed_at
from gone
cross join lateral (values (gone.low, $1 - 1), ($2 + 1, gone.high)) as part (low, high)
where part.low <= part.high
on conflict (low) do update set high = greatest(r.high, excluded.high)
