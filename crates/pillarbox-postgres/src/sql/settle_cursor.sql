update cursor as c
set floor = w.floor, settled = w.settled::int8multirange, anchor_position = w.anchor_position, anchor_id = w.anchor_id,
    takeovers = case when w.calm then 0 else c.takeovers end,
    owner = case when w.release then null else c.owner end
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::uuid[], $8::boolean[],
    $9::boolean[]) as w (subscription, lane, epoch, floor, settled, anchor_position, anchor_id, release, calm)
where c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch
