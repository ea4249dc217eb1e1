select reason, at
from skip
where subscription = $1::bigint and position <= $2::bigint and position_to >= $2
order by position desc
limit 1
