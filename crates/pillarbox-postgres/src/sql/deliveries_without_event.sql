select count(*)
from delivery as d
where not exists (select from event as e where e.position = d.position)
    and not exists (select from event_kept as k where k.position = d.position)
