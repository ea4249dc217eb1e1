-- Of each subscription: since when its oldest delivery waits that is not dead, when the one that has been due for longest was, and since
-- when the longest claim is held. The oldest is the lowest in the log; one that was delayed counts from when it became due. What is dead
-- is not looked at, nor what is not due.
with in_line as (
    select d.subscription, min(d.position) as position, min(d.due_at) filter (where d.state = 'retrying') as due_at
    from delivery as d
    where d.state in ('pending', 'retrying', 'processing')
    group by d.subscription
), claimed as (
    select d.subscription, min(d.claimed_at) as since from delivery as d where d.owner is not null group by d.subscription
)
select
    s.id,
    least(
        case when l.position is not null then coalesce(
            (select greatest(e.created_at, e.deliver_at) from event as e where e.position = l.position),
            (select greatest(k.created_at, k.deliver_at) from event_kept as k where k.position = l.position),
            (select d.since from delivery as d where d.subscription = s.id and d.position = l.position)
        ) end,
        due.due_at
    ),
    least(l.due_at, due.due_at),
    c.since
from subscription as s
left join in_line as l on l.subscription = s.id
left join claimed as c on c.subscription = s.id
left join lateral (
    select d.due_at
    from delivery as d
    where d.subscription = s.id and d.state = 'delayed' and d.due_at <= statement_timestamp()
    order by d.due_at
    limit 1
) as due on true
where l.subscription is not null or c.subscription is not null or due.due_at is not null
