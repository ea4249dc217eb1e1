-- How many deliveries there are in each state; what is said of a state twice adds up. What is dead or delayed is not counted here but as
-- it comes and goes; what was delayed and is due is pending.
with due as (
    select s.id, (
        select count(*) from delivery as d where d.subscription = s.id and d.state = 'delayed' and d.due_at <= statement_timestamp()
    ) as count
    from subscription as s
)
select subscription, state, count(*)
from delivery_state
where stored in ('pending', 'retrying', 'processing')
group by subscription, state
union all
select subscription, state, sum(change)::bigint
from aside_count
group by subscription, state
union all
select id, 'delayed', -count from due where count > 0
union all
select id, 'pending', count from due where count > 0
