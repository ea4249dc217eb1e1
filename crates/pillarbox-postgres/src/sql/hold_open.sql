-- The lowest position in $2 < position <= $3 that retention gave up for a subscription while somebody might still publish it ($1 is the
-- reason), and of which nothing is known to this day.
select min(s.position)
from skip as s
where s.reason = $1::text and s.position > $2::bigint and s.position <= $3::bigint
    and (select count(*) from event as e where e.position >= s.position and e.position <= s.position_to)
        < s.position_to - s.position + 1
    and not exists (select from dead_range as r where r.low <= s.position and r.high >= s.position_to)
