select d.subscription, d.position, d.errors
from delivery as d
join unnest($1::bigint[], $2::bigint[]) as w (subscription, position)
    on d.subscription = w.subscription and d.position = w.position
