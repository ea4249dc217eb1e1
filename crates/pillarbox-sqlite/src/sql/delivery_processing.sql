select subscription, min(claimed_at)
from pillarbox_delivery indexed by pillarbox_delivery_owner
where owner is not null
group by subscription
