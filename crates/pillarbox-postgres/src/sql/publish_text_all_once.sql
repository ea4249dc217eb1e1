-- As publish_once.sql, for clients that bind nothing but texts and bytes.
with claimed as materialized (
    select
        e.*,
        case when dedup_key is not null then @schema@.dedup_claim(topic, key, dedup_key, id::uuid) end as first_id
    from (
        select *
        from unnest(
            $1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::text[], $9::text[],
            $10::text[]
        ) with ordinality as e (
            id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at, dedup_key, ordinality
        )
        order by ordinality
        offset 0
    ) as e
),
inserted as (
    insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
    select
        id::uuid, topic, key, type, payload::json, payload_bytes, content_type, headers::jsonb, deliver_at::timestamptz
    from claimed
    where first_id is null
    order by ordinality
)
select coalesce(first_id::text, id) from claimed order by ordinality
