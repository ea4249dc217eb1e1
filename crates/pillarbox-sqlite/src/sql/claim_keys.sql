-- The next keys above ?2 with a row. Goes from key to key, however many rows each has.
with recursive known (key) as (
    select min(key) from pillarbox_delivery where subscription = ?1 and key > ?2
    union all
    select (select min(key) from pillarbox_delivery where subscription = ?1 and key > known.key)
    from known
    where known.key is not null
)
select key
from known
where key is not null
limit ?3
