-- What the owner of a lane needs: what is not dead; what is dead and is not settled, since its range was left out (in the gaps ?3); and where dead events hold their key back
-- (?4), the first dead one of each key, found key by key. One key more than ?5 says that there are more.
with recursive head (number, key) as (
    select 1, min(key)
    from pillarbox_delivery indexed by pillarbox_delivery_dead
    where subscription = ?1 and lane = ?2 and died_at is not null and key is not null and ?4
    union all
    select
        head.number + 1,
        (
            select min(d.key)
            from pillarbox_delivery as d indexed by pillarbox_delivery_dead
            where d.subscription = ?1 and d.lane = ?2 and d.died_at is not null and d.key is not null and d.key > head.key
        )
    from head
    where head.key is not null and head.number <= ?5
)
select position, key, arrival, state, attempts, due_at, since, 0 as number
from pillarbox_delivery indexed by pillarbox_delivery_alive
where subscription = ?1 and lane = ?2 and died_at is null
union all
select d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since, 0
from json_each(?3) as gap
-- By position, not by lane: few rows lie there, and any number of dead ones may be a lane's.
cross join pillarbox_delivery as d
    on d.subscription = ?1 and d.position between json_extract(gap.value, '$[0]') and json_extract(gap.value, '$[1]')
where +d.lane = ?2 and d.died_at is not null
union all
select d.position, d.key, d.arrival, d.state, d.attempts, d.due_at, d.since, head.number
from head
join pillarbox_delivery as d on d.subscription = ?1 and d.position = (
    select first.position
    from pillarbox_delivery as first indexed by pillarbox_delivery_dead
    where first.subscription = ?1 and first.lane = ?2 and first.died_at is not null and first.key is not null
        and first.key = head.key
    order by first.arrival
    limit 1
)
where head.key is not null
order by arrival, position
