-- One batch, all of it or nothing but for lanes that are somebody else's by now; a statement, so that no transaction is
-- ever left open by a client that stands still.
with gate as materialized (
    -- Held from before the first number is drawn until all is visible; whoever waits for it knows that nothing lower will appear.
    select
        pg_advisory_xact_lock_shared(hashtextextended('pillarbox', '@table@'::regclass::bigint)),
        -- A commit that wrote nothing waits for no disk and no standby, and what is there already may have reached neither yet.
        -- Whoever has lanes writes by locking their fences.
        case when cardinality($1::integer[]) = 0 then pg_logical_emit_message(true, 'pillarbox', '') end
), claimed as (
    select number, epoch from unnest($1::integer[], $2::bigint[]) as claimed (number, epoch)
), held as materialized (
    -- The usual case. The lock is shared, for workers append to one lane at once, and it is taken on the newest version of the
    -- row: a higher epoch that was committed meanwhile is seen.
    select fence.lane
    from @fence@ as fence
    join claimed on claimed.number = fence.lane
    where fence.log_id = $3::uuid
        and fence.subscription = $4::text
        and (fence.incarnation, fence.subscription_id, fence.epoch) = ($5::bigint, $6::bigint, claimed.epoch)
    order by fence.lane
    for share of fence
), raised as (
    -- The first batch of a new owner. Equal is let through, for another worker may have raised it at the same moment.
    insert into @fence@ as fence (log_id, subscription, lane, incarnation, subscription_id, epoch)
    select $3::uuid, $4::text, number, $5::bigint, $6::bigint, epoch
    from claimed
    where number not in (select lane from held)
    order by number
    on conflict (log_id, subscription, lane) do update
    set incarnation = excluded.incarnation, subscription_id = excluded.subscription_id, epoch = excluded.epoch
    where (excluded.incarnation, excluded.subscription_id, excluded.epoch)
        >= (fence.incarnation, fence.subscription_id, fence.epoch)
    returning fence.lane
), owned as materialized (
    select lane from held
    union all
    select lane from raised
), appended as (
    insert into @table@ (
        id, source, topic, type, key, sequence, stream_version, time, content_type, data, data_bytes, headers
    )
    select id, $7::text, topic, type, key, sequence, stream_version, time, content_type, data::json, data_bytes,
        headers::jsonb
    from gate
    cross join unnest(
        $8::integer[], $9::uuid[], $10::text[], $11::text[], $12::text[], $13::bigint[], $14::bigint[], $15::timestamptz[],
        $16::text[], $17::text[], $18::bytea[], $19::text[]
    ) with ordinality as event (
        lane, id, topic, type, key, sequence, stream_version, time, content_type, data, data_bytes, headers, place
    )
    where event.lane is null or event.lane in (select owned.lane from owned)
    order by event.place
    on conflict (id) do nothing
)
select lane from owned
