insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
select id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at
from unnest($1, $2, $3, $4, $5, $6, $7, $8, $9) with ordinality
    as e (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at, ordinality)
order by ordinality
returning coalesce(id, @schema@.event_id(position, created_at))
