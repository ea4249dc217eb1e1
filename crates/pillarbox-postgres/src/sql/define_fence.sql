-- The filters of these subscriptions change: whoever read their lanes with the old ones cannot settle any more. In the order in
-- which everybody locks cursors; the floors are those of the rows as they are locked.
with locked as (
    select subscription, lane from cursor where subscription = any ($1::bigint[]) order by subscription, lane for update
)
update cursor as c
set epoch = c.epoch + 1
from locked as l
where c.subscription = l.subscription and c.lane = l.lane
returning c.subscription, c.lane, c.floor, c.settled::text
