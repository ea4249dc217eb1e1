insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
returning coalesce(id, @schema@.event_id(position, created_at))
