insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
values (
    $1::text::uuid, $2::text, $3::text, $4::text, $5::text::json, $6::bytea, $7::text, $8::text::jsonb, $9::text::timestamptz
)
returning coalesce(id, @schema@.event_id(position, created_at))::text as id
