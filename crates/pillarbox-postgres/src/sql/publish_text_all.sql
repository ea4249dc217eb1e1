-- As publish_all.sql, for clients that bind nothing but texts and bytes.
insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
select
    id::uuid, topic, key, type, payload::json, payload_bytes, content_type, headers::jsonb, deliver_at::timestamptz
from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::text[], $9::text[])
    with ordinality as e (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at, ordinality)
order by ordinality
returning coalesce(id, @schema@.event_id(position, created_at))::text
