-- One delivery of each key, and every one without.
select min(position), key
from pillarbox_delivery
where subscription = ?1 and key is not null
group by key
union all
select position, null
from pillarbox_delivery
where subscription = ?1 and key is null
