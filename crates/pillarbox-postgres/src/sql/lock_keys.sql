-- Nobody claims anything of the keys of these deliveries until the transaction ends.
select
from delivery as d
where d.subscription = $1::bigint and d.queued and d.key in (
    select t.key from delivery as t where t.subscription = $1 and t.position = any($2::bigint[])
)
order by d.position
for update
