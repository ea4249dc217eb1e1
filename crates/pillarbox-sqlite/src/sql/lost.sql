-- Which subscriptions have given up events for the reason ?1 after the time ?2: how many, up to where, when last, and whether there may be
-- more. Of each, the newest ?3 records are looked at, or one more.
select s.name, sum(g.position_to - g.position + 1), max(g.position_to), max(g.at), s.low is not null
from (
    select
        id, name,
        (select position from pillarbox_skip where subscription = id order by position desc limit 1 offset ?3) as low
    from pillarbox_subscription
) as s
join pillarbox_skip as g on g.subscription = s.id and g.position >= ifnull(s.low, 0)
where g.at > ?2 and g.reason = ?1
group by s.id
order by s.name
