select subscription, position, lane
from pillarbox_delivery
where state = 'dead' and since < ?1
order by subscription, position
limit ?2
