select distinct key
from pillarbox_delivery indexed by pillarbox_delivery_lane
where subscription = ?1 and lane = ?2 and key is not null
