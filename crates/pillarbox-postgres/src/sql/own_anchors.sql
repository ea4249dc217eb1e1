-- The anchors of an instance's own lanes.

-- name: own_anchors
-- Anchors of an instance's lanes that the log does not show; retention may have passed them. One look for each lane (`offset 0`):
-- as a join, some plans read the whole log.
select c.anchor_position, c.anchor_id, e.id
from cursor as c
left join lateral (
    select coalesce(e.id, event_id(e.position, e.created_at)) as id from event as e where e.position = c.anchor_position offset 0
) as e on true
where c.owner = $1 and c.anchor_position is not null and e.id is distinct from c.anchor_id
