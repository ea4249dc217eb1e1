-- Who was about to end a claim when he died has ended it after this, or it is left to be recovered.
select
from (select h.subscription, h.position, h.owner from delivery as h where h.owner = any ($1::integer[]) offset 0) as h
join delivery as d on d.subscription = h.subscription and d.position = h.position and d.owner = h.owner
order by d.subscription, d.position
for update of d
