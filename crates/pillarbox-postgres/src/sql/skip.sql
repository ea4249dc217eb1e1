-- Positions that will not be delivered, and why.

-- name: give_up
insert into skip (subscription, position, position_to, reason) values ($1::bigint, $2::bigint, $3::bigint, $4::text)
on conflict (subscription, position) do update set
    position_to = greatest(skip.position_to, excluded.position_to), reason = excluded.reason, at = excluded.at

-- name: skipped
select reason, at
from skip
where subscription = $1::bigint and position <= $2::bigint and position_to >= $2
order by position desc
limit 1

-- name: take_up
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

-- name: hold_open
-- The lowest position in $2 < position <= $3 that retention gave up for a subscription while somebody might still publish it ($1 is the
-- reason), and of which nothing is known to this day.
select min(s.position)
from skip as s
where s.reason = $1::text and s.position > $2::bigint and s.position <= $3::bigint
    and (select count(*) from event as e where e.position >= s.position and e.position <= s.position_to)
        < s.position_to - s.position + 1
    and not exists (select from dead_range as r where r.low <= s.position and r.high >= s.position_to)

-- name: ranges
select subscription, 0 as lane, position as low, position_to as high from skip

-- name: lost
-- Which subscriptions have given up events for the reason $1 within $2 seconds: how many, up to where, when last, and whether there
-- may be more. Of each, the newest $3 records are looked at.
select
    s.name, sum(g.position_to - g.position + 1)::bigint as events, max(g.position_to) as upto, max(g.at) as last_at,
    max(g.looked_at) >= $3 as more
from subscription as s
cross join lateral (
    select k.position, k.position_to, k.reason, k.at, count(*) over () as looked_at
    from (
        select position, position_to, reason, at
        from skip
        where subscription = s.id
        order by position desc
        limit $3
    ) as k
) as g
where g.reason = $1 and g.at > clock_timestamp() - $2 * interval '1 second'
group by s.id, s.name
order by s.name
