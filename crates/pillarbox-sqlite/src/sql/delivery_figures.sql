-- How many deliveries there are in each state; what is said of a state twice adds up. What is dead or delayed is not counted here but as
-- it comes and goes; what was delayed and is due by ?1 is pending.
select subscription, state, count(*)
from pillarbox_delivery_state
where subscription in (select id from pillarbox_subscription) and stored in ('pending', 'processing', 'retrying')
group by subscription, state
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
