-- Of each subscription: since when its oldest delivery waits that is not dead, and when the one that has been due for longest was. The
-- oldest is the lowest in the log; one that was delayed counts from when it became due, by ?1. What is dead is not looked at, nor what is
-- not due.
select
    s.id,
    case
        when l.position is not null then coalesce(
            (select max(created_at, coalesce(deliver_at, created_at)) from pillarbox_event where position = l.position),
            (select max(created_at, coalesce(deliver_at, created_at)) from pillarbox_event_kept where position = l.position),
            (select since from pillarbox_delivery where subscription = s.id and position = l.position)
        )
    end,
    l.due_at,
    (
        select min(due_at) from pillarbox_delivery where subscription = s.id and state = 'delayed' and due_at <= ?1
    )
from pillarbox_subscription as s
left join (
    select
        subscription, min(position) as position,
        min(case when state = 'retrying' then due_at end) as due_at
    from pillarbox_delivery indexed by pillarbox_delivery_by_state
    where subscription in (select id from pillarbox_subscription) and state in ('pending', 'processing', 'retrying')
    group by subscription
) as l on l.subscription = s.id
