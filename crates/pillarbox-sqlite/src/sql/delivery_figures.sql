-- How many deliveries there are in each state; what is said of a state twice adds up. What is dead or delayed is not counted here but as
-- it comes and goes; what was delayed and is due by ?1 is pending. Which index serves is said: SQLite prefers the primary key, and with it
-- every row.
select d.subscription, d.state, count(*)
from pillarbox_subscription as s
cross join pillarbox_delivery as line indexed by pillarbox_delivery_by_state
    on line.subscription = s.id and line.state in ('pending', 'processing', 'retrying')
cross join pillarbox_delivery_state as d on d.subscription = line.subscription and d.position = line.position
group by d.subscription, d.state
union all
select subscription, state, count from pillarbox_aside_count
union all
select subscription, 'delayed', -count(*)
from pillarbox_delivery
where subscription in (select id from pillarbox_subscription) and state = 'delayed' and due_at <= ?1
group by subscription
union all
select subscription, 'pending', count(*)
from pillarbox_delivery
where subscription in (select id from pillarbox_subscription) and state = 'delayed' and due_at <= ?1
group by subscription
