select min(id), min(floor_from), max(floor_to), max(ended_at), group_concat(id)
from pillarbox_progress
where ended_at < ?1 and epoch > 0
group by subscription, lane, epoch, started_at / ?2
having count(*) > 1 and sum(floor_to - floor_from) = max(floor_to) - min(floor_from)
limit ?3
