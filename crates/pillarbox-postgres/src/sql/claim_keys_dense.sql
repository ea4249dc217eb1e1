-- As claim_keys.sql, for keys with few rows each: of at most $3 rows of each kind above the key $2, the keys up to which all kinds were
-- read, and whether there are no more.
with line as (
    select d.key
    from delivery as d
    where d.subscription = $1::bigint and d.key > $2::text and d.state in ('pending', 'retrying', 'processing')
    order by d.key
    limit $3::bigint
),
later as (
    select d.key from delivery as d where d.subscription = $1 and d.key > $2 and d.state = 'delayed' order by d.key limit $3
),
dead as (
    select d.key from delivery as d where d.subscription = $1 and d.key > $2 and d.state = 'dead' order by d.key limit $3
),
-- Null where nothing was left out.
bound as (
    select least(
        (select case when count(*) >= $3 then max(key) end from line),
        (select case when count(*) >= $3 then max(key) end from later),
        (select case when count(*) >= $3 then max(key) end from dead)
    ) as key
)
select u.key, b.key is null
from (select key from line union all select key from later union all select key from dead) as u
cross join bound as b
where b.key is null or u.key <= b.key
group by u.key, b.key
order by u.key
