-- Whoever is about to lose claims for his silence cannot beat meanwhile: one that has beaten since lives.
select
from instance
where id = any ($1::integer[])
    or ($2::boolean and beat_at < clock_timestamp() - interval '1 millisecond' * (
        select min(processing_timeout_ms) from subscription where mode = 'queue'
    ))
order by id
for share
