-- Which subscriptions have given up events for the reason $1 within $2 seconds: how many, up to where, when last, and whether there
-- may be more. Of each, the newest $3 records are looked at.
select s.name, sum(g.position_to - g.position + 1)::bigint, max(g.position_to), max(g.at), max(g.looked_at) >= $3
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
