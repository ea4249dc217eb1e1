with claimed as materialized (
    select @schema@.dedup_claim($2::text, $3::text, $10::text, $1::text::uuid) as first_id
),
inserted as (
    insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
    select
        $1::text::uuid, $2::text, $3::text, $4::text, $5::text::json, $6::bytea, $7::text, $8::text::jsonb,
        $9::text::timestamptz
    from claimed
    where first_id is null
)
select coalesce(first_id::text, $1::text) as id from claimed
