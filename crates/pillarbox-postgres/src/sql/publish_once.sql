-- As publish_all.sql, for events of which some have a dedup_key; returns the ids, in order. Claims are made one after the
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
