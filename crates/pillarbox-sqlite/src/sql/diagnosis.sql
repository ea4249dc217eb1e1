-- What `doctor` looks for.

-- name: deliveries_without_event
select count(*)
from pillarbox_delivery as d
where not exists (select 1 from pillarbox_event as e where e.position = d.position)
    and not exists (select 1 from pillarbox_event_kept as k where k.position = d.position)

-- name: events_in_dead_ranges
select count(*) from pillarbox_dead_range as d join pillarbox_event as e on e.position between d.low and d.high
