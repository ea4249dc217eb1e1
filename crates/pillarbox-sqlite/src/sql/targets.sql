select d.position, d.lane, coalesce(e.id, k.id), d.key
from pillarbox_delivery as d
left join pillarbox_event as e on e.position = d.position
left join pillarbox_event_kept as k on k.position = d.position
where d.subscription = ?1
    and case
        when ?2 is null then d.state = 'dead' and (?3 is null or d.key = ?3)
        else d.position in (select value from json_each(?2))
    end
order by d.position
limit ?4
