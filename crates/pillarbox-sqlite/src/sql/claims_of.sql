select subscription, position, claim
from pillarbox_delivery
where owner = ?1
order by subscription, arrival
