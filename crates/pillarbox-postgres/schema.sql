table aside_count (
    subscription bigint not null,
    state text not null,
    change bigint not null
)

table cursor with (fillfactor=20, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=1000) (
    subscription bigint not null,
    lane integer not null,
    floor bigint not null,
    settled int8multirange not null default '{}'::int8multirange,
    anchor_position bigint,
    anchor_id uuid,
    owner bigint,
    epoch bigint not null default 0,
    revision bigint not null default 0,
    takeovers integer not null default 0
)

table dead_range (
    low bigint not null,
    high bigint not null,
    closed_at timestamp with time zone not null default clock_timestamp()
)

table dedup_0 (
    digest bytea not null,
    id uuid not null,
    created_at timestamp with time zone not null
)

table dedup_1 (
    digest bytea not null,
    id uuid not null,
    created_at timestamp with time zone not null
)

table dedup_2 (
    digest bytea not null,
    id uuid not null,
    created_at timestamp with time zone not null
)

table delivery with (fillfactor=45, autovacuum_vacuum_scale_factor=0.05, autovacuum_vacuum_threshold=1000) (
    subscription bigint not null,
    position bigint not null,
    lane integer not null,
    arrival bigint not null,
    key text,
    state text not null,
    attempts integer not null,
    due_at timestamp with time zone not null,
    since timestamp with time zone not null,
    died_at timestamp with time zone,
    errors text not null default '[]'::text,
    queued boolean not null default false,
    owner integer,
    claim bigint,
    claimed_at timestamp with time zone,
    ready_at timestamp with time zone,
    crashes integer not null default 0
)

table event partition by RANGE ("position") (
    position bigint not null generated always as identity,
    id uuid,
    topic text not null,
    key text,
    type text not null,
    payload json,
    payload_bytes bytea,
    content_type text,
    headers jsonb,
    stream_version bigint,
    deliver_at timestamp with time zone,
    created_at timestamp with time zone not null default clock_timestamp()
)

table event_kept (
    position bigint not null,
    id uuid not null,
    topic text not null,
    key text,
    type text not null,
    payload json,
    payload_bytes bytea,
    content_type text,
    headers jsonb not null,
    stream_version bigint,
    deliver_at timestamp with time zone,
    created_at timestamp with time zone not null
)

table inbox (
    consumer text not null,
    id uuid not null,
    accepted_at timestamp with time zone not null default clock_timestamp()
)

table instance with (fillfactor=50, autovacuum_vacuum_scale_factor=0, autovacuum_vacuum_threshold=1000) (
    id integer not null generated always as identity,
    host text not null,
    pid integer not null,
    version text not null,
    beat bigint not null default 0,
    started_at timestamp with time zone not null default clock_timestamp(),
    beat_at timestamp with time zone not null default clock_timestamp(),
    subscriptions bigint[] not null,
    report text not null default '{"subscriptions":{}}'::text
)

table journal (
    stream text not null,
    version bigint not null,
    position bigint not null
)

table leaf (
    name text not null,
    low bigint not null,
    high bigint,
    attached_at timestamp with time zone not null default clock_timestamp(),
    emptied boolean not null default false
)

table meta (
    one boolean not null default true,
    schema_version integer not null default 0,
    breaking_version integer not null default 0,
    log_id uuid not null default gen_random_uuid(),
    incarnation bigint not null default 1,
    system_identifier text,
    database text,
    database_oid bigint,
    event_oid bigint,
    timeline integer,
    address text,
    port integer,
    reached_as text[] not null default '{}'::text[],
    log_start bigint not null default 1,
    pruned_to bigint not null default 0,
    fresh_floor bigint not null default 0,
    payload_bytes_max integer not null default 1048576,
    dedup_window_ms bigint not null default 86400000,
    dedup_changed_at timestamp with time zone not null default '-infinity'::timestamp with time zone,
    retention_keep_ms bigint not null default 0,
    retention_dead_ms bigint not null default 0,
    retention_inbox_ms bigint not null default 0,
    leaf_size bigint not null default 0,
    leaves_due_since timestamp with time zone,
    leaves_due text,
    recovery_at timestamp with time zone,
    doorbell boolean not null default true,
    id_salt bigint not null default 0
)

table migration (
    version integer not null,
    name text not null,
    breaking boolean not null,
    applied_at timestamp with time zone not null default clock_timestamp()
)

table progress with (fillfactor=70) (
    id bigint not null generated always as identity,
    subscription bigint not null,
    lane integer not null,
    epoch bigint not null,
    floor_from bigint not null,
    floor_to bigint not null,
    started_at timestamp with time zone not null default clock_timestamp(),
    ended_at timestamp with time zone not null default clock_timestamp()
)

table recovery (
    subscription bigint not null,
    cause text not null,
    count bigint not null,
    last_at timestamp with time zone not null
)

table skip (
    subscription bigint not null,
    position bigint not null,
    position_to bigint not null,
    reason text not null,
    at timestamp with time zone not null default clock_timestamp()
)

table stream (
    name text not null,
    version bigint not null,
    topic text not null
)

table subscription (
    id bigint not null generated always as identity,
    name text not null,
    filter text not null,
    mode text not null,
    lanes integer not null,
    on_dead text not null,
    hold_ms bigint,
    retry text not null,
    processing_timeout_ms bigint not null,
    paused boolean not null default false,
    paused_by text,
    paused_reason text,
    defined_by bigint not null,
    created_at timestamp with time zone not null default clock_timestamp(),
    definition bigint not null default 1,
    former_filters text not null default '[]'::text
)

constraint cursor_pkey of cursor PRIMARY KEY (subscription, lane)

constraint dead_range_pkey of dead_range PRIMARY KEY (low)

constraint dedup_0_pkey of dedup_0 PRIMARY KEY (digest)

constraint dedup_1_pkey of dedup_1 PRIMARY KEY (digest)

constraint dedup_2_pkey of dedup_2 PRIMARY KEY (digest)

constraint delivery_pkey of delivery PRIMARY KEY (subscription, "position")

constraint delivery_state_check of delivery CHECK ((state = ANY (ARRAY['pending'::text, 'delayed'::text, 'processing'::text, 'retrying'::text, 'dead'::text])))

constraint event_pkey of event PRIMARY KEY ("position")

constraint event_kept_pkey of event_kept PRIMARY KEY ("position")

constraint consumer_has_1_to_1024_bytes of inbox CHECK (((octet_length(consumer) >= 1) AND (octet_length(consumer) <= 1024)))

constraint inbox_pkey of inbox PRIMARY KEY (consumer, id)

constraint instance_pkey of instance PRIMARY KEY (id)

constraint journal_pkey of journal PRIMARY KEY (stream, version)

constraint leaf_pkey of leaf PRIMARY KEY (name)

constraint meta_one_check of meta CHECK (one)

constraint meta_pkey of meta PRIMARY KEY (one)

constraint migration_pkey of migration PRIMARY KEY (version)

constraint progress_pkey of progress PRIMARY KEY (id)

constraint recovery_pkey of recovery PRIMARY KEY (subscription, cause)

constraint skip_pkey of skip PRIMARY KEY (subscription, "position")

constraint stream_pkey of stream PRIMARY KEY (name)

constraint subscription_name_key of subscription UNIQUE (name)

constraint subscription_pkey of subscription PRIMARY KEY (id)

CREATE INDEX dedup_0_created_at ON pillarbox.dedup_0 USING btree (created_at)

CREATE INDEX dedup_1_created_at_idx ON pillarbox.dedup_1 USING btree (created_at)

CREATE INDEX dedup_2_created_at_idx ON pillarbox.dedup_2 USING btree (created_at)

CREATE INDEX delivery_alive ON pillarbox.delivery USING btree (subscription, lane, arrival) WHERE ((NOT queued) AND (died_at IS NULL))

CREATE INDEX delivery_aside ON pillarbox.delivery USING btree (subscription, state, "position") WHERE (state = ANY (ARRAY['dead'::text, 'delayed'::text]))

CREATE INDEX delivery_dead ON pillarbox.delivery USING btree (subscription, lane, key, arrival) WHERE ((NOT queued) AND (died_at IS NOT NULL) AND (key IS NOT NULL))

CREATE INDEX delivery_dead_key ON pillarbox.delivery USING btree (subscription, key, arrival) WHERE (state = 'dead'::text)

CREATE INDEX delivery_delayed ON pillarbox.delivery USING btree (subscription, due_at, "position") WHERE (state = 'delayed'::text)

CREATE INDEX delivery_delayed_key ON pillarbox.delivery USING btree (subscription, key) WHERE (state = 'delayed'::text)

CREATE INDEX delivery_delayed_lane ON pillarbox.delivery USING btree (subscription, lane, due_at, "position") WHERE (state = 'delayed'::text)

CREATE INDEX delivery_died_at ON pillarbox.delivery USING btree (died_at) WHERE (died_at IS NOT NULL)

CREATE INDEX delivery_lane ON pillarbox.delivery USING btree (subscription, lane, arrival) WHERE (NOT queued)

CREATE INDEX delivery_line ON pillarbox.delivery USING btree (subscription, key, arrival) WHERE (state = ANY (ARRAY['pending'::text, 'retrying'::text, 'processing'::text]))

CREATE INDEX delivery_owner ON pillarbox.delivery USING btree (owner, subscription, "position") WHERE (owner IS NOT NULL)

CREATE INDEX delivery_ready ON pillarbox.delivery USING btree (subscription, ready_at) WHERE ((ready_at IS NOT NULL) AND (owner IS NULL))

CREATE INDEX event_id ON ONLY pillarbox.event USING btree (id) WHERE (is_well_formed(topic, type, key, payload, payload_bytes, content_type, headers, created_at) AND (id IS NOT NULL))

CREATE INDEX event_kept_id ON pillarbox.event_kept USING btree (id)

CREATE INDEX inbox_accepted_at ON pillarbox.inbox USING btree (accepted_at)

CREATE UNIQUE INDEX journal_position ON pillarbox.journal USING btree ("position")

CREATE INDEX progress_lane ON pillarbox.progress USING btree (subscription, lane, id)

11 leaves of event, the last one open-ended

sequence delivery_arrival_seq as bigint start 1 increment 1 cache 1

sequence event_position_seq as bigint start 1 increment 1 cache 1

sequence instance_id_seq as integer start 1 increment 1 cache 1

sequence progress_id_seq as bigint start 1 increment 1 cache 1

sequence subscription_id_seq as bigint start 1 increment 1 cache 1

CREATE OR REPLACE FUNCTION pillarbox.accept(consumer text, id uuid)
 RETURNS boolean
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
    insert into pillarbox.inbox (consumer, id) values (consumer, id) on conflict do nothing;
    return found;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.add_up_aside(rows_max bigint DEFAULT NULL::bigint)
 RETURNS void
 LANGUAGE sql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
    with taken as (
        delete from pillarbox.aside_count as c
        using (select ctid from pillarbox.aside_count limit rows_max for update skip locked) as free
        where c.ctid = free.ctid
        returning c.subscription, c.state, c.change
    )
    insert into pillarbox.aside_count (subscription, state, change)
    select t.subscription, t.state, sum(t.change) from taken as t group by t.subscription, t.state having sum(t.change) <> 0
$function$

CREATE OR REPLACE FUNCTION pillarbox.append_events(stream text, expected_version bigint, topic text, ids uuid[], types text[], payloads json[], payload_bytes bytea[], content_types text[], headers jsonb[])
 RETURNS bigint
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
    added constant bigint := coalesce(cardinality(types), 0);
    found_version bigint;
    found_topic text;
begin
    if added = 0 then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('pillarbox: nothing is appended to stream "%s"', stream),
            hint = 'Give at least one event.';
    end if;
    loop
        update pillarbox.stream as s
        set version = s.version + added
        where s.name = append_events.stream
            and s.topic = append_events.topic
            and (expected_version is null or s.version = expected_version)
        returning s.version - added into found_version;
        exit when found;
        if expected_version is null or expected_version = 0 then
            insert into pillarbox.stream as s (name, version, topic) values (stream, added, append_events.topic)
            on conflict (name) do nothing;
            if found then
                found_version := 0;
                exit;
            end if;
        end if;
        select s.version, s.topic into found_version, found_topic from pillarbox.stream as s where s.name = append_events.stream;
        if coalesce(found_version, 0) <> expected_version then
            raise exception using
                errcode = 'PB409',
                message = format(
                    'pillarbox: stream "%s" is at version %s, not at %s', stream, coalesce(found_version, 0), expected_version
                ),
                hint = 'Load the stream again, decide again, and append with its version.';
        elsif found_topic <> append_events.topic then
            raise exception using
                errcode = 'invalid_parameter_value',
                message = format('pillarbox: stream "%s" has the topic ''%s'', not ''%s''', stream, found_topic, append_events.topic),
                hint = 'A stream has one topic.';
        end if;
        -- Another transaction has just created it, or ended without doing so.
    end loop;
    with appended as (
        insert into pillarbox.event
            (id, topic, key, type, payload, payload_bytes, content_type, headers, stream_version)
        select
            e.id, append_events.topic, append_events.stream, e.type, e.payload, e.payload_bytes, e.content_type, e.headers,
            found_version + e.ordinality
        from unnest(ids, types, payloads, append_events.payload_bytes, content_types, append_events.headers) with ordinality
            as e (id, type, payload, payload_bytes, content_type, headers, ordinality)
        order by e.ordinality
        returning position, stream_version
    )
    insert into pillarbox.journal (stream, version, position)
    select append_events.stream, a.stream_version, a.position from appended as a;
    return found_version + added;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.append(stream text, expected_version bigint, events jsonb, topic text DEFAULT 'journal'::text)
 RETURNS bigint
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
    ids uuid[];
    types text[];
    payloads json[];
    headers jsonb[];
begin
    if jsonb_typeof(events) is distinct from 'array' then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = 'pillarbox: events is no array',
            hint = 'Give events like ''[{"type": "order.placed", "payload": {}}]''.';
    end if;
    select
        array_agg((e.event ->> 'id')::uuid order by e.ordinality), array_agg(e.event ->> 'type' order by e.ordinality),
        array_agg((e.event -> 'payload')::json order by e.ordinality), array_agg(e.event -> 'headers' order by e.ordinality)
    into ids, types, payloads, headers
    from jsonb_array_elements(append.events) with ordinality as e (event, ordinality);
    return pillarbox.append_events(stream, expected_version, topic, ids, types, payloads, null, null, headers);
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.arrange_leaves(bounds bigint[])
 RETURNS void
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
    old record;
    empty boolean;
    spare text[];
    number bigint;
    missing bigint;
    covered bigint;
begin
    perform from pillarbox.meta for update;
    -- Only now: somebody else may have laid leaves while we waited.
    select coalesce(max(substring(name from '[0-9]+$')::bigint), 0) into number from pillarbox.leaf;
    select cardinality(bounds) - count(*) into missing from pillarbox.leaf where low >= bounds[1] or emptied;
    -- Before the lock, so that nobody waits for it.
    spare := array(select pillarbox.make_leaf('event_' || number + n) from generate_series(1, missing) as n);

    lock table pillarbox.event in access exclusive mode;
    for old in select name, emptied from pillarbox.leaf where low >= bounds[1] or emptied order by low loop
        execute format('select not exists (select from pillarbox.%I)', old.name) into empty;
        if empty then
            execute format('alter table pillarbox.event detach partition pillarbox.%I', old.name);
            delete from pillarbox.leaf where name = old.name;
            spare := spare || old.name;
        elsif old.emptied then
            -- Somebody drew a position there before retention came and used it afterwards.
            update pillarbox.leaf set emptied = false where name = old.name;
            spare := spare || pillarbox.make_leaf('event_' || number + greatest(missing, 0) + cardinality(spare) + 1);
        else
            raise exception 'leaf % is not empty any more', old.name using errcode = 'object_in_use';
        end if;
    end loop;
    for old in select name, low from pillarbox.leaf where low < bounds[1] and (high is null or high > bounds[1]) loop
        execute format('alter table pillarbox.event detach partition pillarbox.%I', old.name);
        execute format('alter table pillarbox.event attach partition pillarbox.%I for values from (%s) to (%s)',
            old.name, old.low, bounds[1]);
        update pillarbox.leaf set high = bounds[1] where name = old.name;
    end loop;
    -- What was handed out and has no leaf any more is gone and needs none.
    select greatest(max(high), pg_sequence_last_value('pillarbox.event_position_seq'::regclass) + 1, 1)
    into covered
    from pillarbox.leaf;
    if covered < bounds[1] then
        raise exception 'no leaf would hold the positions from % to %', covered, bounds[1] - 1
            using errcode = 'object_in_use';
    end if;
    for n in 1 .. cardinality(bounds) loop
        execute format('alter table pillarbox.event attach partition pillarbox.%I for values from (%s) to (%s)',
            spare[n], bounds[n], coalesce(bounds[n + 1]::text, 'maxvalue'));
        insert into pillarbox.leaf (name, low, high) values (spare[n], bounds[n], bounds[n + 1]);
    end loop;
    for n in cardinality(bounds) + 1 .. cardinality(spare) loop
        execute format('drop table pillarbox.%I', spare[n]);
    end loop;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.checked_since()
 RETURNS timestamp with time zone
 LANGUAGE sql
 IMMUTABLE PARALLEL SAFE
AS $function$select pg_catalog.to_timestamp(<time>::pg_catalog.float8)$function$

CREATE OR REPLACE FUNCTION pillarbox.claim_deliveries(of_subscription bigint, by_owner integer, first_claim bigint, rows_max integer, suspects boolean, suspect_after integer, ready_since timestamp with time zone, again boolean)
 RETURNS TABLE("position" bigint, topic text, type text, id uuid, key text, payload json, payload_bytes bytea, content_type text, headers jsonb, stream_version bigint, deliver_at timestamp with time zone, created_at timestamp with time zone, claim bigint, arrival bigint, attempts integer, due_at timestamp with time zone, since timestamp with time zone, crashes integer, ready_at timestamp with time zone)
 LANGUAGE sql
AS $function$
    select *
    from pillarbox.claim_deliveries(
        of_subscription, by_owner, first_claim, rows_max, suspects, suspect_after, ready_since, again, 1000, rows_max
    )
$function$

CREATE OR REPLACE FUNCTION pillarbox.claim_deliveries(of_subscription bigint, by_owner integer, first_claim bigint, rows_max integer, suspects boolean, suspect_after integer, ready_since timestamp with time zone, again boolean, placed_max integer, claimed_max integer)
 RETURNS TABLE("position" bigint, topic text, type text, id uuid, key text, payload json, payload_bytes bytea, content_type text, headers jsonb, stream_version bigint, deliver_at timestamp with time zone, created_at timestamp with time zone, claim bigint, arrival bigint, attempts integer, due_at timestamp with time zone, since timestamp with time zone, crashes integer, ready_at timestamp with time zone)
 LANGUAGE plpgsql
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_sort TO 'off'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
declare
    -- So many rows whose hint was wrong are passed over at most; the next call goes on.
    demoted_max constant integer := 1000;
    now_at timestamptz := clock_timestamp();
    dead_blocks boolean;
    -- Fewer where so many took too long; the numbers of all rows_max are the caller's all the same.
    wanted integer := least(rows_max, claimed_max);
    asked integer;
    picked bigint[];
    of_all bigint[];
    picked_count integer;
    suspect bigint[];
    demoted integer := 0;
    passed bigint[] := '{}';
    claimed bigint[];
    told bigint[] := '{}';
begin
    -- A crash of the server takes claims back and ends those who made them: nobody waits for the disk.
    perform set_config('synchronous_commit', 'off', true);
    select s.on_dead = 'block' into dead_blocks
    from pillarbox.subscription as s, pillarbox.instance as i
    where s.id = of_subscription and i.id = by_owner;
    if not found then
        return;
    end if;
    if again then
        told := array(
            select d.position
            from pillarbox.delivery as d
            where d.owner = by_owner and d.subscription = of_subscription and d.claim >= first_claim
                and d.claim < first_claim + rows_max
        );
    end if;
    if told <> '{}' then
        wanted := 0;
    end if;
    if wanted > 0 then
        return query
        select
            null::bigint, null::text, null::text, null::uuid, k.key, null::json, null::bytea, null::text, null::jsonb,
            null::bigint, null::timestamptz, null::timestamptz, null::bigint, null::bigint, null::integer, null::timestamptz,
            null::timestamptz, null::integer, null::timestamptz
        from unnest(pillarbox.place_delayed(of_subscription, now_at, placed_max)) as k (key);
        now_at := clock_timestamp();
    end if;
    while wanted > 0 and demoted < demoted_max loop
        asked := wanted;
        select array_agg(c.position), count(*), array_agg(c.position) filter (where c.crashes >= suspect_after)
        into picked, picked_count, suspect
        from (
            select d.position, d.crashes
            from pillarbox.delivery as d
            where d.subscription = of_subscription and d.ready_at >= ready_since and d.ready_at <= now_at
                and d.owner is null and d.state in ('pending', 'retrying')
                and (d.crashes < suspect_after or suspects) and d.position <> all (passed)
            order by d.ready_at
            limit asked
            for update skip locked
        ) as c;
        exit when picked_count = 0;
        if suspect is not null then
            passed := passed || suspect[2:];
            suspects := false;
            picked := array(
                select p.position from unnest(picked) with ordinality as p (position, number)
                where p.position <> all (passed)
                order by p.number
            );
        end if;
        of_all := array_fill(of_subscription, array[cardinality(picked)]);
        with heads as materialized (
            select w.subscription, w.position, row_number() over (order by w.number) as number
            from unnest(of_all, picked) with ordinality as w (subscription, position, number)
            cross join lateral (
                select r.position, r.key, r.state, r.due_at, r.arrival
                from pillarbox.delivery as r
                where r.subscription = w.subscription and r.position = w.position
                offset 0
            ) as d
            where d.due_at <= now_at and d.state in ('pending', 'retrying')
                and (
                    d.key is null
                    or d.position = (
                        select h.position
                        from pillarbox.delivery as h
                        where h.subscription = of_subscription and h.key = d.key
                            and h.state in ('pending', 'retrying', 'processing')
                        order by h.arrival
                        limit 1
                    ) and (
                        not dead_blocks
                        or (
                            select b.position
                            from pillarbox.delivery as b
                            where b.subscription = of_subscription and b.key = d.key and b.state = 'dead'
                                and b.arrival < d.arrival
                            order by b.arrival
                            limit 1
                        ) is null
                    )
                )
        ), claimed as (
            update pillarbox.delivery as d
            set state = 'processing', owner = by_owner, claim = first_claim + h.number - 1, claimed_at = now_at
            from heads as h
            where d.subscription = any (array[h.subscription]) and d.position = h.position
            returning d.position
        )
        select coalesce(array_agg(c.position), '{}') into claimed from claimed as c;
        if cardinality(claimed) < cardinality(picked) then
            picked := array(select unnest(picked) except select unnest(claimed));
            of_all := array_fill(of_subscription, array[cardinality(picked)]);
            demoted := demoted + cardinality(picked);
            return query
            update pillarbox.delivery as d
            set ready_at = case when d.key is null and d.state in ('pending', 'retrying') then greatest(d.due_at, now_at) end
            from unnest(of_all, picked) as w (subscription, position)
            where d.subscription = any (array[w.subscription]) and d.position = w.position
            returning
                d.position, null::text, null::text, null::uuid, d.key, null::json, null::bytea, null::text, null::jsonb,
                null::bigint, null::timestamptz, null::timestamptz, null::bigint, d.arrival, d.attempts, d.due_at, d.since,
                d.crashes, d.ready_at;
        end if;
        told := told || claimed;
        wanted := wanted - cardinality(claimed);
        first_claim := first_claim + cardinality(claimed);
        exit when picked_count < asked;
    end loop;
    return query
    select
        d.position, coalesce(e.topic, k.topic), coalesce(e.type, k.type), coalesce(e.id, k.id, pillarbox.event_id(e.position, e.created_at)), coalesce(e.key, k.key, d.key),
        coalesce(e.payload, k.payload), coalesce(e.payload_bytes, k.payload_bytes), coalesce(e.content_type, k.content_type),
        coalesce(e.headers, k.headers), coalesce(e.stream_version, k.stream_version), coalesce(e.deliver_at, k.deliver_at),
        coalesce(e.created_at, k.created_at), d.claim, d.arrival, d.attempts, d.due_at, d.since, d.crashes, d.ready_at
    from unnest(array_fill(of_subscription, array[cardinality(told)]), told) as w (subscription, position)
    cross join lateral (
        select * from pillarbox.delivery as r where r.subscription = w.subscription and r.position = w.position offset 0
    ) as d
    left join pillarbox.event as e on e.position = d.position
    left join pillarbox.event_kept as k on k.position = d.position and e.position is null
    order by d.claim;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.count_aside()
 RETURNS trigger
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
    if tg_op = 'TRUNCATE' then
        delete from pillarbox.aside_count;
        return null;
    end if;
    if tg_op <> 'INSERT' and old.state in ('dead', 'delayed') then
        insert into pillarbox.aside_count (subscription, state, change) values (old.subscription, old.state, -1);
    end if;
    if tg_op <> 'DELETE' and new.state in ('dead', 'delayed') then
        insert into pillarbox.aside_count (subscription, state, change) values (new.subscription, new.state, 1);
    end if;
    return null;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.dedup_claim(topic text, key text, dedup_key text, id uuid)
 RETURNS uuid
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
    -- Their lengths come first, so that no two triples give one text.
    hash bytea := sha256(convert_to(
        format('%s %s %s%s%s', octet_length(topic), coalesce(octet_length(key), 0), topic, key, dedup_key), 'UTF8'
    ));
    w record;
    other text;
    first_id uuid;
    put constant text := 'insert into pillarbox.%I values ($1, $2, $3)
        on conflict (digest) do update set id = excluded.id, created_at = excluded.created_at';
begin
    if octet_length(dedup_key) not between 1 and 1024 then
        raise exception using errcode = 'check_violation', message = 'pillarbox: the dedup_key has not 1 to 1024 bytes';
    end if;
    perform pg_advisory_xact_lock(1505352748 + 2, ('x' || encode(substring(hash from 1 for 4), 'hex'))::bit(32)::integer);
    select * into w from pillarbox.dedup_window();
    execute format(
        'select id from pillarbox.%I where digest = $1 and created_at >= $2
        union all select id from pillarbox.%I where digest = $1 and created_at >= $2', w.current_table, w.previous_table
    ) into first_id using hash, w.window_at;
    -- Nobody but retention touches the next table otherwise, so that it can be emptied beside publishers.
    if first_id is null and w.changed then
        execute format('select id from pillarbox.%I where digest = $1 and created_at >= $2', w.next_table)
        into first_id using hash, w.window_at;
    end if;
    if first_id is not null then
        return first_id;
    end if;
    -- Under repeatable read an entry may be there that this transaction cannot see; writing beside it fails with 40001.
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        foreach other in array array[w.previous_table, w.next_table] loop
            execute format(put, other) using hash, id, w.now_at;
            execute format('delete from pillarbox.%I where digest = $1', other) using hash;
        end loop;
    end if;
    execute format(put, w.current_table) using hash, id, w.now_at;
    return null;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.dedup_rotate()
 RETURNS void
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET lock_timeout TO '100ms'
AS $function$
declare
    next_table text;
    filled boolean;
    counts boolean;
begin
    select w.next_table into next_table from pillarbox.dedup_window() as w;
    execute format('select exists (select from pillarbox.%I)', next_table) into filled;
    if not filled then
        return;
    end if;
    execute format('lock table pillarbox.%I in access exclusive mode', next_table);
    execute format(
        'select w.next_table <> $1 or exists (select from pillarbox.%I where created_at >= w.window_at)
        from pillarbox.dedup_window() as w', next_table
    ) into counts using next_table;
    if not counts then
        execute format('truncate pillarbox.%I', next_table);
    end if;
exception
    when lock_not_available then null;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.dedup_window(OUT now_at timestamp with time zone, OUT window_at timestamp with time zone, OUT current_table text, OUT previous_table text, OUT next_table text, OUT changed boolean)
 RETURNS record
 LANGUAGE plpgsql
AS $function$
declare
    -- A hundred years are for ever.
    window_ms_max constant bigint := 3155760000000;
    window_ms bigint;
    changed_at timestamptz;
    number bigint;
begin
    select least(greatest(m.dedup_window_ms, 1), window_ms_max), m.dedup_changed_at
    into window_ms, changed_at
    from pillarbox.meta as m;
    now_at := clock_timestamp();
    window_at := now_at - window_ms * interval '1 millisecond';
    number := (extract(epoch from now_at) * 1000)::bigint / window_ms;
    current_table := 'dedup_' || number % 3;
    previous_table := 'dedup_' || (number + 2) % 3;
    next_table := 'dedup_' || (number + 1) % 3;
    -- A change takes a moment to be committed, and until then others put keys where they do not see it.
    changed := changed_at + interval '1 minute' >= window_at;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.empty_leaf(name text)
 RETURNS void
 LANGUAGE plpgsql
 SECURITY DEFINER
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
    removes constant text := coalesce(nullif(current_setting('pillarbox.removes', true), ''), 'received');
    keep_ms bigint;
    first bigint;
    last bigint;
    newest timestamptz;
    floor bigint;
    missing bigint;
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise exception 'a leaf is emptied in a transaction of isolation level read committed, not %',
            current_setting('transaction_isolation') using errcode = 'invalid_transaction_state';
    end if;
    -- Inside this function the current user is the owner, the session's is who called it.
    if removes <> 'received' and not pg_has_role(session_user, current_user, 'member') then
        raise exception 'must be owner of schema pillarbox (%, or a member of it) to remove events that nobody has received', current_user
            using errcode = 'insufficient_privilege';
    end if;
    -- Whoever rewinds or subscribes waits, or has lowered the floor that is read below.
    select m.retention_keep_ms into keep_ms from pillarbox.meta as m for update;
    -- One that is still to be published into is not to be used elsewhere.
    update pillarbox.leaf
    set emptied = coalesce(high <= pg_sequence_last_value('pillarbox.event_position_seq'::regclass) + 1, false)
    where leaf.name = empty_leaf.name;
    if not found then
        raise exception 'there is no leaf %', name using errcode = 'undefined_table';
    end if;
    -- Nothing appears in it from here on.
    execute format('lock table only pillarbox.%I in access exclusive mode', name);
    execute format('select min(position), max(position) from pillarbox.%I', name) into first, last;
    if last is null then
        return;
    end if;
    execute format('select created_at from pillarbox.%I where position = $1', name) into newest using last;
    select min(c.floor) into floor from pillarbox.cursor as c;
    if floor is null and removes = 'received' then
        raise exception 'leaf % has events that nobody has received, since the log has no subscription', name
            using errcode = 'object_not_in_prerequisite_state';
    elsif floor < last then
        raise exception 'leaf % has events up to %, and a subscription has passed only those up to %', name, last, floor
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    -- Subscription by subscription, by the index of the primary key.
    execute format(
        'select count(*)
         from pillarbox.subscription as s
         cross join lateral (
             select position from pillarbox.delivery where subscription = s.id and position >= $1 and position <= $2
         ) as d
         where exists (select from pillarbox.%I as e where e.position = d.position)
             and not exists (select from pillarbox.event_kept as k where k.position = d.position)', name
    ) into missing using first, last;
    if missing > 0 then
        raise exception 'leaf % has events that deliveries still need: %', name, missing
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    if removes <> 'everything' then
        -- 9223372036854775807 is for ever.
        if newest > clock_timestamp() - least(keep_ms, 3155760000000) * interval '1 millisecond' then
            raise exception 'leaf % has events that are younger than the log is to keep them', name
                using errcode = 'object_not_in_prerequisite_state';
        end if;
        if exists (select from pillarbox.journal as j where j.position >= first and j.position <= last) then
            raise exception 'leaf % has events of a journal', name using errcode = 'object_not_in_prerequisite_state';
        end if;
    end if;
    execute format('truncate table pillarbox.%I', name);
    delete from pillarbox.journal as j where j.position >= first and j.position <= last;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.event_id("position" bigint, created_at timestamp with time zone)
 RETURNS uuid
 LANGUAGE sql
 STABLE PARALLEL SAFE
AS $function$
            select pg_catalog.encode(
                pg_catalog.int8send(pg_catalog.floor(extract(epoch from
                    least(
                        greatest(created_at, pg_catalog.timestamptz 'epoch'),
                        pg_catalog.timestamptz '9999-12-31 23:59:59.999+00'
                    )
                ) operator(pg_catalog.*) 1000::pg_catalog.numeric)::pg_catalog.int8
                    operator(pg_catalog.<<) 16 operator(pg_catalog.|) 28672::pg_catalog.int8)
                operator(pg_catalog.||) pg_catalog.int8send(
                    (("position" operator(pg_catalog.+) <salt>::pg_catalog.int8)
                        operator(pg_catalog.&) 4611686018427387903::pg_catalog.int8)
                    operator(pg_catalog.|) (1::pg_catalog.int8 operator(pg_catalog.<<) 63)
                ),
                'hex'
            )::pg_catalog.uuid
        $function$

CREATE OR REPLACE FUNCTION pillarbox.is_well_formed(topic text, type text, key text, payload json, payload_bytes bytea, content_type text, headers jsonb, created_at timestamp with time zone)
 RETURNS boolean
 LANGUAGE plpgsql
 IMMUTABLE PARALLEL SAFE
AS $function$
begin
    if payload_bytes is null and content_type is null
        and (
            (pg_catalog.octet_length(topic) operator(pg_catalog.-) 1)
            operator(pg_catalog.|) (pg_catalog.octet_length(type) operator(pg_catalog.-) 1)
            operator(pg_catalog.|) coalesce(pg_catalog.octet_length(key) operator(pg_catalog.-) 1, 0)
        ) operator(pg_catalog.>>) 10 operator(pg_catalog.=) 0
        and pg_catalog.pg_column_size(payload) operator(pg_catalog.<=) pillarbox.payload_bytes_max()
        and pg_catalog.pg_column_compression(payload) is null
        and (
            headers is null
            or pg_catalog.pg_column_size(headers) operator(pg_catalog.<=) 65536
            and pg_catalog.pg_column_compression(headers) is null
            and headers operator(pg_catalog.@>) '{}'
        )
    then
        return true;
    end if;
    if created_at operator(pg_catalog.<=) pillarbox.checked_since() then
        return true;
    end if;
    if (payload is null or payload_bytes is null)
        and (
            (pg_catalog.octet_length(topic) operator(pg_catalog.-) 1)
            operator(pg_catalog.|) (pg_catalog.octet_length(type) operator(pg_catalog.-) 1)
            operator(pg_catalog.|) coalesce(pg_catalog.octet_length(key) operator(pg_catalog.-) 1, 0)
        ) operator(pg_catalog.>>) 10 operator(pg_catalog.=) 0
        and coalesce(pg_catalog.octet_length(content_type), 0) operator(pg_catalog.<=) 255
        and coalesce(pg_catalog.pg_column_size(payload), pg_catalog.pg_column_size(payload_bytes), 0)
            operator(pg_catalog.<=) pillarbox.payload_bytes_max()
        and coalesce(pg_catalog.pg_column_compression(payload), pg_catalog.pg_column_compression(payload_bytes)) is null
        and (
            headers is null
            or pg_catalog.pg_column_size(headers) operator(pg_catalog.<=) 65536
            and pg_catalog.pg_column_compression(headers) is null
            and headers operator(pg_catalog.@>) '{}'
        )
    then
        return true;
    end if;
    return pillarbox.refuse_event(topic, type, key, payload, payload_bytes, content_type, headers);
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.make_leaf(name text)
 RETURNS text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
    execute format('create table pillarbox.%I (like pillarbox.event including defaults including constraints including storage '
        'including compression including indexes)', name);
    return name;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.new_id()
 RETURNS uuid
 LANGUAGE sql
 PARALLEL SAFE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
    select encode(
        set_bit(set_bit(overlay(
            uuid_send(gen_random_uuid())
            placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
            from 1 for 6
        ), 52, 1), 53, 1),
        'hex'
    )::uuid
$function$

CREATE OR REPLACE FUNCTION pillarbox.order_key(key text)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
begin
    if key is null then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = 'pillarbox: an ordered event needs a key',
            hint = 'Order is kept by key: give the event a key, or leave ordered out.';
    end if;
    perform pg_advisory_xact_lock(1505352748 + 1, hashtext(key));
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.payload_bytes_max()
 RETURNS integer
 LANGUAGE sql
 IMMUTABLE PARALLEL SAFE
AS $function$select 1048576$function$

CREATE OR REPLACE FUNCTION pillarbox.place_delayed(of_subscription bigint, until timestamp with time zone, rows_max integer)
 RETURNS text[]
 LANGUAGE plpgsql
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_sort TO 'off'
 SET jit TO 'off'
AS $function$
declare
    due bigint[];
    due_lanes integer[];
    free_lanes integer[];
    other_lane integer;
    of_all bigint[];
    placed_keys text[];
begin
    due_lanes := array(
        select distinct f.lane
        from (
            select d.lane
            from pillarbox.delivery as d
            where d.subscription = of_subscription and d.state = 'delayed' and d.due_at <= until and d.queued
            order by d.due_at, d.position
            limit rows_max
        ) as f
    );
    if due_lanes = '{}' then
        return '{}';
    end if;
    free_lanes := array(
        select c.lane
        from pillarbox.cursor as c
        where c.subscription = of_subscription and c.lane = any (due_lanes)
        for no key update skip locked
    );
    if free_lanes <> '{}' then
        -- No more rows than these are looked at, whatever lies behind those of lanes that are not free.
        due := array(
            select f.position
            from (
                select d.position, d.lane
                from pillarbox.delivery as d
                where d.subscription = of_subscription and d.state = 'delayed' and d.due_at <= until and d.queued
                order by d.due_at, d.position
                limit rows_max
            ) as f
            where f.lane = any (free_lanes)
        );
    else
        -- Another lane, with a look at the index for each. Bounds and order are written so that no other index serves them.
        select c.lane into other_lane
        from pillarbox.cursor as c
        where c.subscription = of_subscription and c.lane <> all (due_lanes)
            and (
                select d.position
                from pillarbox.delivery as d
                where d.subscription = of_subscription and d.state = 'delayed' and d.queued
                    and d.lane >= c.lane and (d.lane, d.due_at) <= (c.lane, until)
                order by d.lane, d.due_at, d.position
                limit 1
            ) is not null
        limit 1
        for no key update of c skip locked;
        if not found then
            return '{}';
        end if;
        due := array(
            select d.position
            from pillarbox.delivery as d
            where d.subscription = of_subscription and d.state = 'delayed' and d.queued
                and d.lane >= other_lane and (d.lane, d.due_at) <= (other_lane, until)
            order by d.lane, d.due_at, d.position
            limit rows_max
        );
    end if;
    of_all := array_fill(of_subscription, array[cardinality(due)]);
    due := array(
        select w.position
        from unnest(of_all, due) as w (subscription, position)
        cross join lateral (
            select r.state
            from pillarbox.delivery as r
            where r.subscription = w.subscription and r.position = w.position
            offset 0
            for update skip locked
        ) as locked
        where locked.state = 'delayed'
    );
    if due = '{}' then
        return '{}';
    end if;
    of_all := array_fill(of_subscription, array[cardinality(due)]);
    with placed as (
        update pillarbox.delivery as d
        set state = 'pending', arrival = nextval('pillarbox.delivery_arrival_seq'),
            ready_at = case when d.key is null then clock_timestamp() end
        from unnest(of_all, due) as w (subscription, position)
        where d.subscription = any (array[w.subscription]) and d.position = w.position
        returning d.key
    )
    select array_agg(distinct p.key) filter (where p.key is not null) into placed_keys from placed as p;
    if placed_keys is null then
        return '{}';
    end if;
    perform pillarbox.promote(array_fill(of_subscription, array[cardinality(placed_keys)]), placed_keys);
    return array(
        select distinct d.key
        from unnest(of_all, due) as w (subscription, position)
        cross join lateral (
            select r.key, r.ready_at
            from pillarbox.delivery as r
            where r.subscription = w.subscription and r.position = w.position
            offset 0
        ) as d
        where d.key is not null and d.ready_at is null
    );
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.promote(subscriptions bigint[], keys text[])
 RETURNS bigint
 LANGUAGE plpgsql
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_sort TO 'off'
 SET jit TO 'off'
AS $function$
declare
    promoted bigint;
begin
    -- A hint; what is lost of it is found by claims.
    perform set_config('synchronous_commit', 'off', true);
    -- One look at the index for each key. Not inlined: the planner would join every row with every key. And where a row is looked up by
    -- itself nothing else is said of it: the planner would take another index than the primary key's.
    with heads as materialized (
        select k.subscription, h.position
        from unnest(subscriptions, keys) as k (subscription, key)
        join pillarbox.subscription as s on s.id = k.subscription
        cross join lateral (
            select d.position, d.arrival, d.state, d.owner, d.ready_at
            from pillarbox.delivery as d
            where d.subscription = k.subscription and d.key = k.key and d.state in ('pending', 'retrying', 'processing')
            order by d.arrival
            limit 1
        ) as h
        where h.ready_at is null and h.owner is null and h.state in ('pending', 'retrying')
            and (
                s.on_dead <> 'block'
                or (
                    select b.position
                    from pillarbox.delivery as b
                    where b.subscription = k.subscription and b.key = k.key and b.state = 'dead' and b.arrival < h.arrival
                    order by b.arrival
                    limit 1
                ) is null
            )
    ), free as materialized (
        select h.subscription, h.position
        from heads as h
        cross join lateral (
            select d.ready_at, d.owner, d.state
            from pillarbox.delivery as d
            where d.subscription = any (array[h.subscription]) and d.position = h.position
            offset 0
            for update skip locked
        ) as locked
        where locked.ready_at is null and locked.owner is null and locked.state in ('pending', 'retrying')
    )
    update pillarbox.delivery as d
    set ready_at = greatest(d.due_at, clock_timestamp())
    from free as f
    where d.subscription = any (array[f.subscription]) and d.position = f.position;
    get diagnostics promoted = row_count;
    return promoted;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.publish_bytes(topic text, type text, payload bytea, content_type text, key text DEFAULT NULL::text, headers jsonb DEFAULT '{}'::jsonb, deliver_at timestamp with time zone DEFAULT NULL::timestamp with time zone, dedup_key text DEFAULT NULL::text, id uuid DEFAULT NULL::uuid, ordered boolean DEFAULT false)
 RETURNS uuid
 LANGUAGE plpgsql
AS $function$
declare
    first_id uuid;
    written_position bigint;
    written_at timestamptz;
begin
    -- The rest costs nothing where there is nothing of it to do.
    if ordered or dedup_key is not null then
        if ordered then
            perform pillarbox.order_key(key);
        end if;
        if dedup_key is not null then
            id := coalesce(id, pillarbox.new_id());
            first_id := pillarbox.dedup_claim(topic, key, dedup_key, id);
            if first_id is not null then
                return first_id;
            end if;
        end if;
    end if;
    insert into pillarbox.event as e (id, topic, key, type, payload_bytes, content_type, headers, deliver_at)
    values (id, topic, key, type, payload, content_type, nullif(headers, '{}'), deliver_at)
    returning e.position, e.created_at into written_position, written_at;
    return coalesce(id, pillarbox.event_id(written_position, written_at));
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.publish(topic text, type text, payload jsonb DEFAULT NULL::jsonb, key text DEFAULT NULL::text, headers jsonb DEFAULT '{}'::jsonb, deliver_at timestamp with time zone DEFAULT NULL::timestamp with time zone, dedup_key text DEFAULT NULL::text, id uuid DEFAULT NULL::uuid, ordered boolean DEFAULT false)
 RETURNS uuid
 LANGUAGE plpgsql
AS $function$
declare
    first_id uuid;
    written_position bigint;
    written_at timestamptz;
begin
    -- The rest costs nothing where there is nothing of it to do.
    if ordered or dedup_key is not null then
        if ordered then
            perform pillarbox.order_key(key);
        end if;
        if dedup_key is not null then
            id := coalesce(id, pillarbox.new_id());
            first_id := pillarbox.dedup_claim(topic, key, dedup_key, id);
            if first_id is not null then
                return first_id;
            end if;
        end if;
    end if;
    insert into pillarbox.event as e (id, topic, key, type, payload, headers, deliver_at)
    values (id, topic, key, type, pg_catalog.to_json(payload), nullif(headers, '{}'), deliver_at)
    returning e.position, e.created_at into written_position, written_at;
    return coalesce(id, pillarbox.event_id(written_position, written_at));
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.random_id_salt()
 RETURNS bigint
 LANGUAGE sql
AS $function$
    select ('x' || encode(substring(uuid_send(gen_random_uuid()) from 1 for 8), 'hex'))::bit(64)::bigint & 2305843009213693951
$function$

CREATE OR REPLACE FUNCTION pillarbox.refuse()
 RETURNS trigger
 LANGUAGE plpgsql
AS $function$
begin
    raise exception using
        errcode = 'object_not_in_prerequisite_state',
        message = case tg_op
            when 'UPDATE' then 'pillarbox: an event is never changed; publish another one'
            else 'pillarbox: events are only removed by retention; see `pillarbox prune` and `pillarbox reset`'
        end;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.refuse_event(topic text, type text, key text, payload json, payload_bytes bytea, content_type text, headers jsonb)
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE PARALLEL SAFE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
    payload_size integer;
begin
    payload_size := coalesce(octet_length(payload::text), octet_length(payload_bytes), 0);
    if octet_length(topic) not between 1 and 1024 then
        raise check_violation using constraint = 'topic_has_1_to_1024_bytes',
            message = 'topic_has_1_to_1024_bytes: the topic has ' || octet_length(topic) || ' bytes';
    elsif octet_length(type) not between 1 and 1024 then
        raise check_violation using constraint = 'type_has_1_to_1024_bytes',
            message = 'type_has_1_to_1024_bytes: the type has ' || octet_length(type) || ' bytes';
    elsif octet_length(key) not between 1 and 1024 then
        raise check_violation using constraint = 'key_has_1_to_1024_bytes',
            message = 'key_has_1_to_1024_bytes: the key has ' || octet_length(key) || ' bytes',
            hint = case key when '' then 'Leave the key out (null) if the event has none.' else 'Use a shorter key.' end;
    elsif octet_length(content_type) > 255 then
        raise check_violation using constraint = 'content_type_has_at_most_255_bytes',
            message = format(
                'content_type_has_at_most_255_bytes: the content type has %s bytes', octet_length(content_type)
            );
    elsif payload is not null and payload_bytes is not null then
        raise check_violation using constraint = 'payload_or_payload_bytes',
            message = 'payload_or_payload_bytes: an event has JSON or bytes, not both';
    elsif jsonb_typeof(headers) <> 'object' then
        raise check_violation using constraint = 'headers_is_a_json_object',
            message = 'headers_is_a_json_object: headers is ' || jsonb_typeof(headers);
    elsif (
        case when pg_column_compression(headers) is null then pg_column_size(headers) - 4
            else octet_length(headers::text) end
    ) > 65536 then
        raise check_violation using constraint = 'headers_has_at_most_65536_bytes',
            message = format(
                'headers_has_at_most_65536_bytes: the headers have %s bytes as text and %s as jsonb',
                octet_length(headers::text), pg_column_size(headers)
            ),
            hint = 'The limit holds for both. Put large values into the payload.';
    elsif payload_size > pillarbox.payload_bytes_max() then
        raise check_violation using constraint = 'payload_has_at_most_payload_bytes_max_bytes',
            message = format(
                'payload_has_at_most_payload_bytes_max_bytes: the payload has %s bytes, more than payload_bytes_max = %s',
                payload_size, pillarbox.payload_bytes_max()
            ),
            hint = 'Store it elsewhere and publish a reference.';
    end if;
    return true;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.set_doorbell(is_on boolean)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
begin
    if is_on then
        alter table only pillarbox.event alter column created_at set default case
            when pg_try_advisory_lock_shared(1505352748, 0) and pg_advisory_unlock_shared(1505352748, 0) then clock_timestamp()
            -- A relay that stands still asleep takes no rings in: they must not fill the queue of the whole server.
            when pg_notification_queue_usage() > 0.1 then clock_timestamp()
            -- It rings with the commit.
            when pg_notify('pillarbox', '') is not null then clock_timestamp()
        end;
    else
        alter table only pillarbox.event alter column created_at set default clock_timestamp();
    end if;
    update pillarbox.meta set doorbell = is_on;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.set_id_salt(salt bigint)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
begin
    execute format($sql$
        create or replace function pillarbox.event_id("position" bigint, created_at timestamptz)
        returns uuid language sql stable parallel safe as $$
            select pg_catalog.encode(
                pg_catalog.int8send(pg_catalog.floor(extract(epoch from
                    least(
                        greatest(created_at, pg_catalog.timestamptz 'epoch'),
                        pg_catalog.timestamptz '9999-12-31 23:59:59.999+00'
                    )
                ) operator(pg_catalog.*) 1000::pg_catalog.numeric)::pg_catalog.int8
                    operator(pg_catalog.<<) 16 operator(pg_catalog.|) 28672::pg_catalog.int8)
                operator(pg_catalog.||) pg_catalog.int8send(
                    (("position" operator(pg_catalog.+) %s::pg_catalog.int8)
                        operator(pg_catalog.&) 4611686018427387903::pg_catalog.int8)
                    operator(pg_catalog.|) (1::pg_catalog.int8 operator(pg_catalog.<<) 63)
                ),
                'hex'
            )::pg_catalog.uuid
        $$
    $sql$, salt);
    update pillarbox.meta set id_salt = salt;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.set_payload_bytes_max(size integer)
 RETURNS void
 LANGUAGE plpgsql
AS $function$
declare
    -- Times and positions rise together, but for a clock that was set back.
    newest constant timestamptz := greatest(clock_timestamp(), (
        select max(e.created_at) from (select created_at from pillarbox.event order by position desc limit 1000) as e
    ));
begin
    execute format(
        'create or replace function pillarbox.checked_since() returns timestamptz language sql immutable parallel safe as %L',
        format('select pg_catalog.to_timestamp(%s::pg_catalog.float8)', extract(epoch from newest))
    );
    execute format(
        'create or replace function pillarbox.payload_bytes_max() returns integer language sql immutable parallel safe as %L',
        'select ' || size
    );
    update pillarbox.meta set payload_bytes_max = size;
end
$function$

CREATE OR REPLACE FUNCTION pillarbox.wait_for_lock(class integer, number integer, shared boolean)
 RETURNS boolean
 LANGUAGE plpgsql
 SET lock_timeout TO '2s'
AS $function$
begin
    if shared then
        perform pg_advisory_xact_lock_shared(class, number);
    else
        perform pg_advisory_lock(class, number);
    end if;
    return true;
exception when lock_not_available or query_canceled then
    return false;
end
$function$

CREATE TRIGGER count_aside_delete AFTER DELETE ON pillarbox.delivery FOR EACH ROW WHEN ((old.state = ANY (ARRAY['dead'::text, 'delayed'::text]))) EXECUTE FUNCTION count_aside()

CREATE TRIGGER count_aside_insert AFTER INSERT ON pillarbox.delivery FOR EACH ROW WHEN ((new.state = ANY (ARRAY['dead'::text, 'delayed'::text]))) EXECUTE FUNCTION count_aside()

CREATE TRIGGER count_aside_truncate AFTER TRUNCATE ON pillarbox.delivery FOR EACH STATEMENT EXECUTE FUNCTION count_aside()

CREATE TRIGGER count_aside_update AFTER UPDATE OF state ON pillarbox.delivery FOR EACH ROW WHEN (((old.state <> new.state) AND ((old.state = ANY (ARRAY['dead'::text, 'delayed'::text])) OR (new.state = ANY (ARRAY['dead'::text, 'delayed'::text]))))) EXECUTE FUNCTION count_aside()

CREATE TRIGGER is_never_changed BEFORE DELETE OR UPDATE ON pillarbox.event FOR EACH STATEMENT EXECUTE FUNCTION refuse()

CREATE TRIGGER is_only_removed_by_retention BEFORE TRUNCATE ON pillarbox.event FOR EACH STATEMENT EXECUTE FUNCTION refuse()

view delivery_state as
 SELECT d.subscription,
    d."position",
    d.lane,
    d.arrival,
    d.key,
    d.attempts,
    d.due_at,
    d.since,
    d.errors,
        CASE
            WHEN ((d.state = 'delayed'::text) AND (d.due_at <= clock_timestamp())) THEN 'pending'::text
            WHEN ((d.key IS NOT NULL) AND (d.state = ANY (ARRAY['pending'::text, 'retrying'::text])) AND ((EXISTS ( SELECT 1
               FROM delivery head
              WHERE ((head.subscription = d.subscription) AND (head.key = d.key) AND (head.arrival < d.arrival) AND (head.state = ANY (ARRAY['pending'::text, 'retrying'::text, 'processing'::text]))))) OR ((s.on_dead = 'block'::text) AND (EXISTS ( SELECT 1
               FROM delivery head
              WHERE ((head.subscription = d.subscription) AND (head.key = d.key) AND (head.arrival < d.arrival) AND (head.state = 'dead'::text))))))) THEN 'blocked'::text
            ELSE d.state
        END AS state,
    d.owner,
    d.claimed_at,
    d.state AS stored
   FROM (delivery d
     JOIN subscription s ON ((s.id = d.subscription)));

view event_view as
 SELECT event."position",
    COALESCE(event.id, event_id(event."position", event.created_at)) AS id,
    event.created_at,
    event.topic,
    event.key,
    event.type,
    COALESCE((event.payload)::text, encode(event.payload_bytes, 'escape'::text)) AS payload,
    COALESCE(event.content_type,
        CASE
            WHEN (event.payload IS NOT NULL) THEN 'application/json'::text
            ELSE NULL::text
        END) AS content_type,
    COALESCE(event.headers, '{}'::jsonb) AS headers,
    event.stream_version,
    event.deliver_at
   FROM event
UNION ALL
 SELECT event_kept."position",
    event_kept.id,
    event_kept.created_at,
    event_kept.topic,
    event_kept.key,
    event_kept.type,
    COALESCE((event_kept.payload)::text, encode(event_kept.payload_bytes, 'escape'::text)) AS payload,
    COALESCE(event_kept.content_type,
        CASE
            WHEN (event_kept.payload IS NOT NULL) THEN 'application/json'::text
            ELSE NULL::text
        END) AS content_type,
    event_kept.headers,
    event_kept.stream_version,
    event_kept.deliver_at
   FROM event_kept;
