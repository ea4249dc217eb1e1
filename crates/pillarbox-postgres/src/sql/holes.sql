-- Stretches between visible events above $1, at most $2 events on, and what lies above the last of them.
select previous + 1, position - 1
from (
    select position, lag(position, 1, $1::bigint) over (order by position) as previous
    from (select position from event where position > $1 order by position limit $2::bigint) as visible
) as neighbours
where position > previous + 1
order by 1
