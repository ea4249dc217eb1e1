-- One that was delayed counts from when it became due.
select
    d.subscription,
    min(case
        when d.state = 'dead' then null
        when d.state <> 'delayed' then coalesce(e.created_at, k.created_at, d.since)
        when d.due_at <= clock_timestamp() then d.due_at
    end),
    min(case when d.state = 'retrying' or (d.state = 'delayed' and d.due_at <= clock_timestamp()) then d.due_at end),
    min(d.claimed_at)
from delivery as d
left join event as e on e.position = d.position
left join event_kept as k on k.position = d.position
group by d.subscription
