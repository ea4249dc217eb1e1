-- Takes positions out of what was given up; the rest of a range stays as it was.
with hit as (
    delete from skip
    where subscription = $1::bigint and int8range(position, position_to, '[]') && $2::text::int8multirange
    returning position, position_to, reason, at
)
insert into skip as s (subscription, position, position_to, reason, at)
-- Two records may overlap.
select distinct on (lower(rest)) $1, lower(rest), upper(rest) - 1, reason, at
from hit
cross join lateral unnest(int8multirange(int8range(position, position_to, '[]')) - $2::text::int8multirange) as rest
order by lower(rest), upper(rest) desc
on conflict (subscription, position) do update set position_to = greatest(s.position_to, excluded.position_to)
