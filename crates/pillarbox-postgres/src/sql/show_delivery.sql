select state, attempts, due_at, since, errors
from delivery_state
where subscription = $1::bigint and position = $2::bigint
