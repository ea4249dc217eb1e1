-- The least that each of four roles needs. Roles belong to the whole cluster: make them once, or grant to your own instead.
create role pillarbox_publisher nologin;
create role pillarbox_relay nologin;
create role pillarbox_viewer nologin;
create role pillarbox_journal nologin;

grant usage on schema @schema@ to pillarbox_publisher, pillarbox_relay, pillarbox_viewer, pillarbox_journal;

-- Publishers. Neither position nor stream_version, and nothing on the sequence: with them a publisher could put an event
-- where every reader has been already.
grant insert (id, topic, key, type, payload, payload_bytes, content_type, headers, deliver_at) on @schema@.event
to pillarbox_publisher;
-- What the id of an event is made of that brought none.
grant select (position, id, created_at) on @schema@.event to pillarbox_publisher;
-- Functions are named one by one, since not every database lets everybody call what is new.
grant execute on function
    @schema@.new_id(),
    @schema@.order_key(text),
    @schema@.publish(text, text, jsonb, text, jsonb, timestamptz, text, uuid, boolean),
    @schema@.publish_bytes(text, text, bytea, text, text, jsonb, timestamptz, text, uuid, boolean),
    @schema@.dedup_claim(text, text, text, uuid),
    @schema@.append(text, bigint, jsonb, text),
    @schema@.append_events(text, bigint, text, uuid[], text[], json[], bytea[], text[], jsonb[])
to pillarbox_publisher;
-- A service that publishes is mostly one that receives as well.
grant execute on function @schema@.accept(text, uuid) to pillarbox_publisher;

-- Applications that read the streams of their journal, beside what publishers have.
grant select on @schema@.stream, @schema@.journal, @schema@.event, @schema@.event_view to pillarbox_journal;

-- Relays and operators' commands. They read the log and keep the books; the log itself they cannot write.
grant select on all tables in schema @schema@ to pillarbox_relay;
grant select on all sequences in schema @schema@ to pillarbox_relay;
grant usage on sequence @schema@.instance_id_seq, @schema@.delivery_arrival_seq to pillarbox_relay;
grant insert, update, delete on
    @schema@.subscription, @schema@.cursor, @schema@.instance, @schema@.delivery, @schema@.dead_range, @schema@.skip,
    @schema@.progress, @schema@.event_kept, @schema@.recovery
to pillarbox_relay;
grant update on @schema@.meta to pillarbox_relay;
-- Retention of the inbox; what was accepted is never changed.
grant delete on @schema@.inbox to pillarbox_relay;
grant execute on function
    @schema@.dedup_rotate(), @schema@.arrange_leaves(bigint[]), @schema@.empty_leaf(text),
    @schema@.wait_for_lock(integer, integer, boolean),
    @schema@.claim_deliveries(bigint, integer, bigint, integer, boolean, integer, timestamptz, boolean),
    @schema@.claim_deliveries(bigint, integer, bigint, integer, boolean, integer, timestamptz, boolean, integer, integer),
    @schema@.place_delayed(bigint, timestamptz, integer), @schema@.promote(bigint[], text[]), @schema@.add_up_aside(bigint)
to pillarbox_relay;
-- Called by a plain insert, and by a look for an id.
grant execute on function
    @schema@.is_well_formed(text, text, text, json, bytea, text, jsonb, timestamptz),
    @schema@.refuse_event(text, text, text, json, bytea, text, jsonb),
    @schema@.payload_bytes_max(),
    @schema@.checked_since(),
    @schema@.event_id(bigint, timestamptz)
to pillarbox_publisher, pillarbox_relay, pillarbox_viewer, pillarbox_journal;

-- Viewers: `status`, `list`, `show`, `why`, `tail`.
grant select on all tables in schema @schema@ to pillarbox_viewer;
grant select on all sequences in schema @schema@ to pillarbox_viewer;

-- Lets them name who holds the horizon, with its age and statement.
grant pg_read_all_stats to pillarbox_relay, pillarbox_viewer;
