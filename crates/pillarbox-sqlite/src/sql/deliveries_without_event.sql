select count(*)
from pillarbox_delivery as d
where not exists (select 1 from pillarbox_event as e where e.position = d.position)
    and not exists (select 1 from pillarbox_event_kept as k where k.position = d.position)
