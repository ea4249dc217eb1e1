-- Positions that will not be delivered, and why.

-- name: give_up
insert into pillarbox_skip (subscription, position, position_to, reason, at) values (?1, ?2, ?3, ?4, ?5)
on conflict (subscription, position) do update set
    position_to = max(position_to, excluded.position_to), reason = excluded.reason, at = excluded.at

-- name: skipped
select reason, at
from pillarbox_skip
where subscription = ?1 and position <= ?2 and position_to >= ?2
order by position desc
limit 1

-- name: within
select position, position_to, reason, at
from pillarbox_skip
where subscription = ?1
    and position <= ?3
    and position_to >= ?2

-- name: remove
delete from pillarbox_skip where subscription = ?1 and position = ?2

-- name: ranges
select position as low, position_to as high from pillarbox_skip where subscription = ?1

-- name: lost
-- Which subscriptions have given up events for the reason ?1 after the time ?2: how many, up to where, when last, and whether there may be
-- more. Of each, the newest ?3 records are looked at, or one more.
select
    s.name, sum(g.position_to - g.position + 1) as events, max(g.position_to) as upto, max(g.at) as last_at,
    s.low is not null as more
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
