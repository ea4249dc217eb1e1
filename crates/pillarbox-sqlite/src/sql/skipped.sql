select reason, at
from pillarbox_skip
where subscription = ?1 and position <= ?2 and position_to >= ?2
order by position desc
limit 1
