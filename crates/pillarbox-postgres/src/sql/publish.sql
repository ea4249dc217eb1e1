-- Publishing: for typed parameters of tokio-postgres, and as text for every other client.

-- name: typed
insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
returning coalesce(id, @schema@.event_id(position, created_at))

-- name: typed_once
-- As `typed_all`, for events of which some have a dedup_key; returns the ids, in order. Claims are made one after the
-- other, each seeing those before.
with claimed as materialized (
    select
        e.*,
        case when dedup_key is not null then @schema@.dedup_claim(topic, key, dedup_key, id) end as first_id
    from (
        select *
        from unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) with ordinality as e (
            id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at, dedup_key, ordinality
        )
        order by ordinality
        offset 0
    ) as e
),
inserted as (
    insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
    select id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at
    from claimed
    where first_id is null
    order by ordinality
)
select coalesce(first_id, id) from claimed order by ordinality

-- name: typed_all
insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
select id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at
from unnest($1, $2, $3, $4, $5, $6, $7, $8, $9) with ordinality
    as e (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at, ordinality)
order by ordinality
returning coalesce(id, @schema@.event_id(position, created_at))

-- name: text
insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
values (
    $1::text::uuid, $2::text, $3::text, $4::text, $5::text::json, $6::bytea, $7::text, $8::text::jsonb, $9::text::timestamptz
)
returning coalesce(id, @schema@.event_id(position, created_at))::text as id

-- name: text_once
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

-- name: text_all
-- As `typed_all`, for clients that bind nothing but texts and bytes.
insert into @schema@.event (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at)
select
    id::uuid, topic, key, type, payload::json, payload_bytes, content_type, headers::jsonb, deliver_at::timestamptz
from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::text[], $9::text[])
    with ordinality as e (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at, ordinality)
order by ordinality
returning coalesce(id, @schema@.event_id(position, created_at))::text

-- name: text_all_once
-- As `typed_once`, for clients that bind nothing but texts and bytes.
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
