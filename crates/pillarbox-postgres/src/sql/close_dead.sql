-- What retention has removed is not dead.
insert into dead_range (low, high)
select greatest(w.low, m.pruned_to + 1), w.high
from unnest($1::bigint[], $2::bigint[]) as w (low, high), meta as m
where w.high > m.pruned_to
on conflict (low) do update set high = greatest(dead_range.high, excluded.high)
