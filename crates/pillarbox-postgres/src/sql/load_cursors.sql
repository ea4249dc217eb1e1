select w.ordinal, c.floor, c.settled::text, c.anchor_position, c.anchor_id, c.takeovers, c.revision,
    (select e.id from event as e where e.position = c.anchor_position)
from unnest($1::bigint[], $2::integer[], $3::bigint[]) with ordinality as w (subscription, lane, epoch, ordinal)
join cursor as c on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch
