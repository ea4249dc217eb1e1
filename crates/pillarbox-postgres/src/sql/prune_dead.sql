select subscription, position, lane
from delivery
where died_at < $1::timestamptz
order by died_at
limit $2::bigint
