-- What one snapshot shows of a stretch of the log, as ranges.
select min(position), max(position)
from (
    select position, position - row_number() over (order by position) as island
    from event
    where position > $1 and position <= $2
) as visible
group by island
