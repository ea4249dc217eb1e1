-- Who was about to end a claim when he died has ended it after this, or it is left to be recovered.
select
from delivery
where owner = any ($1::integer[])
order by subscription, position
for update
