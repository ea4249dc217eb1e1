update cursor as c
set floor = w.floor, settled = w.settled::int8multirange, anchor_position = w.anchor_position, anchor_id = w.anchor_id,
    takeovers = case when w.calm then 0 else c.takeovers end,
    owner = case when w.release then null else c.owner end
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::text[], $5::bigint[], $6::uuid[], $7::boolean[],
    $8::boolean[]) as w (subscription, lane, floor, settled, anchor_position, anchor_id, release, calm)
where c.subscription = w.subscription and c.lane = w.lane
