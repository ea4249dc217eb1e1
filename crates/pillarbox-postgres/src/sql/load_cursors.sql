select w.ordinal, c.floor, c.settled::text, c.anchor_position, c.anchor_id, c.takeovers, c.revision,
    (select coalesce(e.id, event_id(e.position, e.created_at)) from event as e where e.position = c.anchor_position),
    (select max(d.arrival) from delivery as d where d.subscription = c.subscription and d.lane = c.lane and not d.queued)
from unnest($1::bigint[], $2::integer[], $3::bigint[]) with ordinality as w (subscription, lane, epoch, ordinal)
join cursor as c on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch
