select epoch, started_at, ended_at
from pillarbox_progress
where subscription = ?1 and lane = ?2 and floor_from < ?3 and floor_to >= ?3 and epoch > 0
order by id desc
limit 1
