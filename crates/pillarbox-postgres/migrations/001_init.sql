-- breaking: yes
-- @schema@ is the schema's name, @class@ the first half of the advisory lock keys of this log, @channel@ the channel of the doorbell.

-- Not `create schema if not exists`: that asks for the right to create schemas even if this one is there.
do $$
begin
    if to_regnamespace('@schema@') is null then
        create schema @schema@;
    end if;
end
$$;

create table @schema@.migration (
    version integer primary key,
    name text not null,
    breaking boolean not null,
    applied_at timestamptz not null default clock_timestamp()
);

-- One row: what the log is, how far retention went, and the limits that bind everybody.
create table @schema@.meta (
    one boolean primary key default true check (one),
    schema_version integer not null default 0,
    breaking_version integer not null default 0,
    log_id uuid not null default gen_random_uuid(),
    incarnation bigint not null default 1,
    -- The home: the cluster, the database, the table and the timeline that the log was last at home in. Null: at home
    -- where it is.
    system_identifier text,
    database text,
    database_oid bigint,
    event_oid bigint,
    timeline integer,
    -- Where the server listens, as it says, and by which names clients have reached it there.
    address text,
    port integer,
    reached_as text[] not null default '{}',
    -- The lowest position that retention has left.
    log_start bigint not null default 1,
    -- Retention has been this far; up to here only a journal's leaves are left.
    pruned_to bigint not null default 0,
    -- Nothing up to here is ever delivered: it was in the log when that was declared a fresh copy.
    fresh_floor bigint not null default 0,
    payload_bytes_max integer not null default 1048576,
    dedup_window_ms bigint not null default 86400000,
    -- When that was changed: for a window's time after that, keys lie in other tables than it says.
    dedup_changed_at timestamptz not null default '-infinity',
    -- Nobody's retention removes what is younger.
    retention_keep_ms bigint not null default 0,
    retention_dead_ms bigint not null default 0,
    retention_inbox_ms bigint not null default 0,
    -- Positions of a leaf; 0: from the rate of publishing.
    leaf_size bigint not null default 0,
    -- Since when retention wants other leaves than there are and could not have them, and why.
    leaves_due_since timestamptz,
    leaves_due text,
    -- When claims were last looked through for owners that give no sign of life.
    recovery_at timestamptz
);
insert into @schema@.meta default values;

-- A time-ordered id (version 7), so that the index of the ids grows at its end.
create function @schema@.new_id() returns uuid language sql volatile parallel safe as $$
    select encode(
        set_bit(set_bit(overlay(
            uuid_send(gen_random_uuid())
            placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
            from 1 for 6
        ), 52, 1), 53, 1),
        'hex'
    )::uuid
$$;

-- Changed by replacing it; no table is locked for that.
create function @schema@.payload_bytes_max() returns integer language sql immutable parallel safe as 'select 1048576';

-- Refuses with the name of what was violated. A payload's size in memory has four bytes of its own: no cast, no copy.
create function @schema@.is_well_formed(
    topic text, type text, key text, payload json, payload_bytes bytea, headers jsonb
) returns boolean language plpgsql stable parallel safe as $$
begin
    -- As few steps as will do: PostgreSQL prepares them anew in each transaction.
    if topic <> '' and type <> '' and key is distinct from ''
        and greatest(octet_length(topic), octet_length(type), octet_length(key)) <= 1024
        and (payload is null or payload_bytes is null)
        and coalesce(pg_column_size(payload), pg_column_size(payload_bytes), 4) - 4 <= @schema@.payload_bytes_max()
        and headers @> '{}'
    then
        return true;
    end if;
    if octet_length(topic) not between 1 and 1024 then
        raise check_violation using constraint = 'topic_has_1_to_1024_bytes',
            message = 'topic_has_1_to_1024_bytes: the topic has ' || octet_length(topic) || ' bytes';
    elsif octet_length(type) not between 1 and 1024 then
        raise check_violation using constraint = 'type_has_1_to_1024_bytes',
            message = 'type_has_1_to_1024_bytes: the type has ' || octet_length(type) || ' bytes';
    elsif octet_length(key) not between 1 and 1024 then
        raise check_violation using constraint = 'key_has_1_to_1024_bytes',
            message = 'key_has_1_to_1024_bytes: the key has ' || octet_length(key) || ' bytes',
            hint = 'Leave the key out (null) if the event has none.';
    elsif payload is not null and payload_bytes is not null then
        raise check_violation using constraint = 'payload_or_payload_bytes',
            message = 'payload_or_payload_bytes: an event has JSON or bytes, not both';
    elsif jsonb_typeof(headers) is distinct from 'object' then
        raise check_violation using constraint = 'headers_is_a_json_object',
            message = 'headers_is_a_json_object: headers is ' || coalesce(jsonb_typeof(headers), 'null');
    else
        raise check_violation using constraint = 'payload_has_at_most_payload_bytes_max_bytes',
            message = format(
                'payload_has_at_most_payload_bytes_max_bytes: the payload has %s bytes, more than payload_bytes_max = %s',
                coalesce(pg_column_size(payload), pg_column_size(payload_bytes)) - 4, @schema@.payload_bytes_max()
            ),
            hint = 'Store it elsewhere and publish a reference.';
    end if;
end
$$;

-- The log.
create table @schema@.event (
    position bigint generated always as identity (cache 1) primary key,
    id uuid not null default @schema@.new_id(),
    topic text not null,
    key text,
    type text not null,
    payload json,
    payload_bytes bytea,
    content_type text,
    headers jsonb not null default '{}',
    stream_version bigint,
    deliver_at timestamptz,
    created_at timestamptz not null default clock_timestamp(),
    -- One check by a function: PostgreSQL reads every check of a table anew for each INSERT, and six cost a third of it.
    constraint event_is_well_formed check (
        @schema@.is_well_formed(topic, type, key, payload, payload_bytes, headers)
    )
) partition by range (position);

-- Serves `show` and every command that names an event by its id; one index a leaf.
create index event_id on @schema@.event (id);

-- The leaves as they are attached; written in the transaction that attaches. `high` is exclusive; null: open-ended.
create table @schema@.leaf (
    name text primary key,
    low bigint not null,
    high bigint,
    attached_at timestamptz not null default clock_timestamp(),
    -- Emptied by retention: may be used again.
    emptied boolean not null default false
);

-- Copies of events that deliveries still need after their leaf was emptied.
create table @schema@.event_kept (
    position bigint primary key,
    id uuid not null,
    topic text not null,
    key text,
    type text not null,
    payload json,
    payload_bytes bytea,
    content_type text,
    headers jsonb not null,
    stream_version bigint,
    deliver_at timestamptz,
    created_at timestamptz not null
);
create index event_kept_id on @schema@.event_kept (id);

create table @schema@.subscription (
    id bigint generated always as identity primary key,
    name text not null unique,
    filter text not null,
    mode text not null,
    lanes integer not null,
    on_dead text not null,
    hold_ms bigint,
    retry text not null,
    processing_timeout_ms bigint not null,
    paused boolean not null default false,
    -- 'operator' or 'receiver', while it is paused.
    paused_by text,
    paused_reason text,
    defined_by bigint not null,
    created_at timestamptz not null default clock_timestamp()
);

-- Rewritten all the time: room on the page, and no index on what changes.
create table @schema@.cursor (
    subscription bigint not null,
    lane integer not null,
    floor bigint not null,
    settled int8multirange not null default '{}',
    anchor_position bigint,
    anchor_id uuid,
    owner bigint,
    epoch bigint not null default 0,
    revision bigint not null default 0,
    takeovers integer not null default 0,
    primary key (subscription, lane)
) with (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

create table @schema@.instance (
    id integer generated always as identity primary key,
    host text not null,
    pid integer not null,
    version text not null,
    beat bigint not null default 0,
    started_at timestamptz not null default clock_timestamp(),
    beat_at timestamptz not null default clock_timestamp(),
    subscriptions bigint[] not null,
    report text not null default '{"subscriptions":{}}'
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- The places of the rows of queues among those of their key. No cache: the numbers rise over all sessions.
create sequence @schema@.delivery_arrival_seq;

-- The slow path. The state `blocked` is never stored: see the view below. A claim makes a larger version of each row of a page,
-- and finds room for it there.
create table @schema@.delivery (
    subscription bigint not null,
    position bigint not null,
    lane integer not null,
    arrival bigint not null,
    key text,
    state text not null check (state in ('pending', 'delayed', 'processing', 'retrying', 'dead')),
    attempts integer not null,
    due_at timestamptz not null,
    since timestamptz not null,
    died_at timestamptz,
    errors text not null default '[]',
    -- A row of a queue: instances compete for it.
    queued boolean not null default false,
    -- Who works on it, under which number, since when. Nobody else can change it.
    owner integer,
    claim bigint,
    claimed_at timestamptz,
    -- Of a queue: since when it is the first of its key, or when it is due if that is later; null: not known to be the first. Only
    -- a hint for finding it. Stays as it is while somebody works on it, so that a claim touches no index.
    ready_at timestamptz,
    -- How often it was taken from somebody who did not end it.
    crashes integer not null default 0,
    primary key (subscription, position)
) with (fillfactor = 45, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

-- Serves the search for a key's head (blocked, promotion, requeue by key, rewind of a key). Keys of 1,024 bytes fit.
create index delivery_key on @schema@.delivery (subscription, key, arrival) where key is not null;
-- Serves the load of a lane in order of arrival.
create index delivery_lane on @schema@.delivery (subscription, lane, arrival) where not queued;
-- Serves claims: what has waited longest for its turn.
create index delivery_ready on @schema@.delivery (subscription, ready_at) where ready_at is not null;
-- Serves retention: which deliveries have been dead for too long.
create index delivery_died_at on @schema@.delivery (died_at) where died_at is not null;

-- How many claims of a queue were taken from their owners, by cause.
create table @schema@.recovery (
    subscription bigint not null,
    cause text not null,
    count bigint not null,
    last_at timestamptz not null,
    primary key (subscription, cause)
);

-- A delivery as people see it: blocked while an earlier-arrived unfinished one of its key exists. Delayed ones stand outside
-- the order until they are due, and are then pending even if nobody is there to notice; dead ones block only where the
-- subscription says so.
create view @schema@.delivery_state as
select
    d.subscription, d.position, d.lane, d.arrival, d.key, d.attempts, d.due_at, d.since, d.errors,
    case
        when d.state = 'delayed' and d.due_at <= clock_timestamp() then 'pending'
        when d.key is not null and d.state in ('pending', 'retrying') and exists (
            select 1
            from @schema@.delivery as head
            where head.subscription = d.subscription and head.key = d.key and head.arrival < d.arrival
                and head.state <> 'delayed' and (head.state <> 'dead' or s.on_dead = 'block')
        ) then 'blocked'
        else d.state
    end as state,
    d.owner, d.claimed_at
from @schema@.delivery as d
join @schema@.subscription as s on s.id = d.subscription;

create table @schema@.dead_range (
    low bigint primary key,
    high bigint not null,
    closed_at timestamptz not null default clock_timestamp()
);

-- What was given up, by an operator or by retention, with the reason.
create table @schema@.skip (
    subscription bigint not null,
    position bigint not null,
    position_to bigint not null,
    reason text not null,
    at timestamptz not null default clock_timestamp(),
    primary key (subscription, position)
);

-- What the settlements say they covered: floor_from < position <= floor_to. Epoch 0 is what the lane was never to deliver:
-- what lay before the start, was in the log when it was declared a fresh copy, or was dropped because the hold was over.
create table @schema@.progress (
    id bigint generated always as identity primary key,
    subscription bigint not null,
    lane integer not null,
    epoch bigint not null,
    floor_from bigint not null,
    floor_to bigint not null,
    started_at timestamptz not null default clock_timestamp(),
    ended_at timestamptz not null default clock_timestamp()
) with (fillfactor = 70);
create index progress_lane on @schema@.progress (subscription, lane, id);

create table @schema@.stream (
    name text primary key,
    version bigint not null
);

-- Which deduplication keys were seen, by a hash of topic, key and deduplication key. Three tables: that of the current
-- window, that of the one before, and one that nobody touches and retention empties.
create table @schema@.dedup_0 (
    digest bytea primary key,
    id uuid not null,
    created_at timestamptz not null
);
-- Serves retention: whether a table has anything that still counts.
create index dedup_0_created_at on @schema@.dedup_0 (created_at);
create table @schema@.dedup_1 (like @schema@.dedup_0 including all);
create table @schema@.dedup_2 (like @schema@.dedup_0 including all);

-- The leaves: ten of 10,000 positions, and one for whatever comes after. Made alone and then attached, as all later ones are.
do $$
declare
    low bigint;
    high bigint;
begin
    for number in 1..11 loop
        low := (number - 1) * 10000 + 1;
        high := case when number <= 10 then number * 10000 + 1 end;
        execute format(
            'create table @schema@.event_%s (like @schema@.event including defaults including constraints '
            'including storage including indexes)', number
        );
        execute format(
            'alter table @schema@.event attach partition @schema@.event_%s for values from (%s) to (%s)',
            number, low, coalesce(high::text, 'maxvalue')
        );
        insert into @schema@.leaf (name, low, high) values ('event_' || number, low, high);
    end loop;
end
$$;

-- The log as people read it, with what was kept of emptied leaves.
create view @schema@.event_view as
select
    position, id, created_at, topic, key, type,
    coalesce(payload::text, encode(payload_bytes, 'escape')) as payload,
    coalesce(content_type, case when payload is not null then 'application/json' end) as content_type,
    headers, stream_version, deliver_at
from @schema@.event
union all
select
    position, id, created_at, topic, key, type,
    coalesce(payload::text, encode(payload_bytes, 'escape')) as payload,
    coalesce(content_type, case when payload is not null then 'application/json' end) as content_type,
    headers, stream_version, deliver_at
from @schema@.event_kept;

create function @schema@.ring() returns trigger language plpgsql as $$
begin
    perform pg_notify('@channel@', '');
    return null;
end
$$;

-- An awake relay holds the lock alone, or waits for it: then nobody rings. Asked for here and not in the function, which is then
-- not even called.
create trigger doorbell after insert on @schema@.event
for each statement when (pg_try_advisory_xact_lock_shared(@class@, 0)) execute function @schema@.ring();

-- Waits for a lock of this log for two seconds at most: an open-ended wait keeps a snapshot, which stops vacuum in the whole
-- database. Neither time nor a cancel is an error in the server's log. What is not shared stays with the session.
create function @schema@.wait_for_lock(class integer, number integer, shared boolean) returns boolean
language plpgsql set lock_timeout = '2s' as $$
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
$$;

create function @schema@.refuse() returns trigger language plpgsql as $$
begin
    raise exception using
        errcode = 'object_not_in_prerequisite_state',
        message = case tg_op
            when 'UPDATE' then 'pillarbox: an event is never changed; publish another one'
            else 'pillarbox: events are only removed by retention; see `pillarbox prune` and `pillarbox reset`'
        end;
end
$$;

create trigger is_never_changed before update or delete on @schema@.event
for each statement execute function @schema@.refuse();

create trigger is_only_removed_by_retention before truncate on @schema@.event
for each statement execute function @schema@.refuse();

-- The window of deduplication now: since when a key counts, which table is which, and whether another window put keys that
-- count into other tables.
create function @schema@.dedup_window(
    out now_at timestamptz,
    out window_at timestamptz,
    out current_table text,
    out previous_table text,
    out next_table text,
    out changed boolean
) language plpgsql as $$
declare
    -- A hundred years are for ever.
    window_ms_max constant bigint := 3155760000000;
    window_ms bigint;
    changed_at timestamptz;
    number bigint;
begin
    select least(greatest(m.dedup_window_ms, 1), window_ms_max), m.dedup_changed_at
    into window_ms, changed_at
    from @schema@.meta as m;
    now_at := clock_timestamp();
    window_at := now_at - window_ms * interval '1 millisecond';
    number := (extract(epoch from now_at) * 1000)::bigint / window_ms;
    current_table := 'dedup_' || number % 3;
    previous_table := 'dedup_' || (number + 2) % 3;
    next_table := 'dedup_' || (number + 1) % 3;
    -- A change takes a moment to be committed, and until then others put keys where they do not see it.
    changed := changed_at + interval '1 minute' >= window_at;
end
$$;

-- The id of the first event with this deduplication key inside the window; null if there is none, and then this one is it.
-- The caller's transaction keeps others with the same key waiting until it ends.
create function @schema@.dedup_claim(topic text, key text, dedup_key text, id uuid) returns uuid
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    -- Their lengths come first, so that no two triples give one text.
    hash bytea := sha256(convert_to(
        format('%s %s %s%s%s', octet_length(topic), coalesce(octet_length(key), 0), topic, key, dedup_key), 'UTF8'
    ));
    w record;
    other text;
    first_id uuid;
    put constant text := 'insert into @schema@.%I values ($1, $2, $3)
        on conflict (digest) do update set id = excluded.id, created_at = excluded.created_at';
begin
    if octet_length(dedup_key) not between 1 and 1024 then
        raise exception using errcode = 'check_violation', message = 'pillarbox: the dedup_key has not 1 to 1024 bytes';
    end if;
    perform pg_advisory_xact_lock(@class@ + 2, ('x' || encode(substring(hash from 1 for 4), 'hex'))::bit(32)::integer);
    select * into w from @schema@.dedup_window();
    execute format(
        'select id from @schema@.%I where digest = $1 and created_at >= $2
        union all select id from @schema@.%I where digest = $1 and created_at >= $2', w.current_table, w.previous_table
    ) into first_id using hash, w.window_at;
    -- Nobody but retention touches the next table otherwise, so that it can be emptied beside publishers.
    if first_id is null and w.changed then
        execute format('select id from @schema@.%I where digest = $1 and created_at >= $2', w.next_table)
        into first_id using hash, w.window_at;
    end if;
    if first_id is not null then
        return first_id;
    end if;
    -- Under repeatable read an entry may be there that this transaction cannot see; writing beside it fails with 40001.
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        foreach other in array array[w.previous_table, w.next_table] loop
            execute format(put, other) using hash, id, w.now_at;
            execute format('delete from @schema@.%I where digest = $1', other) using hash;
        end loop;
    end if;
    execute format(put, w.current_table) using hash, id, w.now_at;
    return null;
end
$$;

-- Empties the table of the next window, for retention, if nothing in it counts any more: the clock may have been set back, and
-- another window may have put keys there. Whoever could still use the table began a window ago: it is left alone then, and
-- looked at again later.
create function @schema@.dedup_rotate() returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms' as $$
declare
    next_table text;
    filled boolean;
    counts boolean;
begin
    select w.next_table into next_table from @schema@.dedup_window() as w;
    execute format('select exists (select from @schema@.%I)', next_table) into filled;
    if not filled then
        return;
    end if;
    execute format('lock table @schema@.%I in access exclusive mode', next_table);
    execute format(
        'select w.next_table <> $1 or exists (select from @schema@.%I where created_at >= w.window_at)
        from @schema@.dedup_window() as w', next_table
    ) into counts using next_table;
    if not counts then
        execute format('truncate @schema@.%I', next_table);
    end if;
exception
    when lock_not_available then null;
end
$$;

-- Locks a key until the transaction ends, so that its events get an order before they get positions.
create function @schema@.order_key(key text) returns void language plpgsql as $$
begin
    if key is null then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = 'pillarbox: an ordered event needs a key',
            hint = 'Order is kept by key: give the event a key, or leave ordered out.';
    end if;
    perform pg_advisory_xact_lock(@class@ + 1, hashtext(key));
end
$$;

create function @schema@.publish(
    topic text,
    type text,
    payload jsonb default null,
    key text default null,
    headers jsonb default '{}',
    deliver_at timestamptz default null,
    dedup_key text default null,
    id uuid default null,
    ordered boolean default false
) returns uuid language plpgsql as $$
declare
    first_id uuid;
begin
    -- The rest costs nothing where there is nothing of it to do.
    if id is null or ordered or dedup_key is not null then
        id := coalesce(id, @schema@.new_id());
        if ordered then
            perform @schema@.order_key(key);
        end if;
        if dedup_key is not null then
            first_id := @schema@.dedup_claim(topic, key, dedup_key, id);
            if first_id is not null then
                return first_id;
            end if;
        end if;
    end if;
    insert into @schema@.event (id, topic, key, type, payload, headers, deliver_at)
    values (id, topic, key, type, payload::json, coalesce(headers, '{}'), deliver_at);
    return id;
end
$$;

create function @schema@.publish_bytes(
    topic text,
    type text,
    payload bytea,
    content_type text,
    key text default null,
    headers jsonb default '{}',
    deliver_at timestamptz default null,
    dedup_key text default null,
    id uuid default null,
    ordered boolean default false
) returns uuid language plpgsql as $$
declare
    first_id uuid;
begin
    -- The rest costs nothing where there is nothing of it to do.
    if id is null or ordered or dedup_key is not null then
        id := coalesce(id, @schema@.new_id());
        if ordered then
            perform @schema@.order_key(key);
        end if;
        if dedup_key is not null then
            first_id := @schema@.dedup_claim(topic, key, dedup_key, id);
            if first_id is not null then
                return first_id;
            end if;
        end if;
    end if;
    insert into @schema@.event (id, topic, key, type, payload_bytes, content_type, headers, deliver_at)
    values (id, topic, key, type, payload, content_type, coalesce(headers, '{}'), deliver_at);
    return id;
end
$$;

-- The head of the stream is locked before the first position is drawn: version order is position order is commit order.
create function @schema@.append(
    stream text,
    expected_version bigint,
    events jsonb,
    topic text default 'journal'
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    found_version bigint;
    new_version bigint;
begin
    if jsonb_typeof(events) is distinct from 'array' then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = 'pillarbox: events is no array',
            hint = 'Give events like ''[{"type": "order.placed", "payload": {}}]''.';
    end if;
    insert into @schema@.stream as s (name, version) values (stream, 0) on conflict (name) do nothing;
    select s.version into found_version from @schema@.stream as s where s.name = stream for update;
    if found_version <> expected_version then
        raise exception using
            errcode = 'PB409',
            message = format('pillarbox: stream "%s" is at version %s, not at %s', stream, found_version, expected_version),
            hint = 'Load the stream again, decide again, and append with its version.';
    end if;
    new_version := found_version + jsonb_array_length(events);
    update @schema@.stream as s set version = new_version where s.name = stream;
    insert into @schema@.event (id, topic, key, type, payload, headers, stream_version)
    select
        coalesce((e.event ->> 'id')::uuid, @schema@.new_id()), append.topic, append.stream, e.event ->> 'type',
        (e.event -> 'payload')::json, coalesce(e.event -> 'headers', '{}'), found_version + e.ordinality
    from jsonb_array_elements(append.events) with ordinality as e (event, ordinality)
    order by e.ordinality;
    return new_version;
end
$$;

-- Claims rows of a queue that are ready, those that have waited longest for their turn first: at most rows_max, at most one of
-- them suspect (taken from suspect_after or more who did not end it), and that only with `suspects`. Only what is ready since
-- ready_since is looked at. With `again`, what was claimed under these numbers is told, if anything was. What comes without a number was not the first of its key after all: the caller has to promote its key
-- once this is committed.
--
-- No index is touched. Rows are chosen and locked by the hint ready_at; whether they are the first of their key is looked at by a
-- later statement, which sees whatever was committed before the lock. Among the rows of a key that are pending, retrying or
-- processing, the one that is processing is always the first: whoever gives a row a place before others locks those others.
-- The planner's choices are fixed, since the table grows faster than its statistics.
create function @schema@.claim_deliveries(
    of_subscription bigint, by_owner integer, first_claim bigint, rows_max integer, suspects boolean, suspect_after integer,
    ready_since timestamptz, again boolean
) returns table (
    "position" bigint, topic text, type text, id uuid, key text, payload json, payload_bytes bytea, content_type text,
    headers jsonb, stream_version bigint, deliver_at timestamptz, created_at timestamptz,
    claim bigint, arrival bigint, attempts integer, due_at timestamptz, since timestamptz, crashes integer, ready_at timestamptz
) language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
#variable_conflict use_column
declare
    now_at constant timestamptz := clock_timestamp();
    dead_blocks boolean;
    wanted integer := rows_max;
    asked integer;
    picked bigint[];
    picked_count integer;
    delayed bigint[];
    suspect bigint[];
    lanes integer[];
    passed bigint[] := '{}';
    claimed bigint[];
    told bigint[] := '{}';
begin
    -- A crash of the server takes claims back and ends those who made them: nobody waits for the disk.
    perform set_config('synchronous_commit', 'off', true);
    select s.on_dead = 'block' into dead_blocks
    from @schema@.subscription as s, @schema@.instance as i
    where s.id = of_subscription and i.id = by_owner;
    if not found then
        return;
    end if;
    if again then
        told := array(
            select d.position
            from @schema@.delivery as d
            where d.subscription = of_subscription and d.owner = by_owner and d.claim >= first_claim
                and d.claim < first_claim + rows_max
        );
    end if;
    if told <> '{}' then
        wanted := 0;
    end if;
    while wanted > 0 loop
        asked := wanted;
        select
            array_agg(c.position), count(*), array_agg(c.position) filter (where c.state = 'delayed'),
            array_agg(c.position) filter (where c.crashes >= suspect_after)
        into picked, picked_count, delayed, suspect
        from (
            select d.position, d.state, d.crashes
            from @schema@.delivery as d
            where d.subscription = of_subscription and d.ready_at >= ready_since and d.ready_at <= now_at
                and d.owner is null and (d.crashes < suspect_after or suspects) and d.position <> all (passed)
            order by d.ready_at
            limit asked
            for update skip locked
        ) as c;
        exit when picked_count = 0;
        if suspect is not null then
            passed := passed || suspect[2:];
            suspects := false;
        end if;
        if delayed is not null then
            -- What is due takes its place behind what its key has. While somebody adds to its lane, nobody knows what that is.
            lanes := array(
                select c.lane
                from @schema@.cursor as c
                where c.subscription = of_subscription and c.lane in (
                    select d.lane from @schema@.delivery as d
                    where d.subscription = of_subscription and d.position = any (delayed)
                )
                for share skip locked
            );
            update @schema@.delivery as d
            set state = 'pending', arrival = nextval('@schema@.delivery_arrival_seq')
            from unnest(delayed) as w (position)
            where d.subscription = of_subscription and d.position = w.position and d.lane = any (lanes);
            passed := passed || array(
                select d.position from @schema@.delivery as d
                where d.subscription = of_subscription and d.position = any (delayed) and d.state = 'delayed'
            );
        end if;
        if passed <> '{}' then
            picked := array(
                select p.position from unnest(picked) with ordinality as p (position, number)
                where p.position <> all (passed)
                order by p.number
            );
        end if;
        with heads as (
            select w.position, row_number() over (order by w.number) as number
            from unnest(picked) with ordinality as w (position, number)
            join @schema@.delivery as d on d.subscription = of_subscription and d.position = w.position
            where d.due_at <= now_at and d.state in ('pending', 'retrying')
                and (
                    d.key is null
                    or d.position = (
                        select h.position
                        from @schema@.delivery as h
                        where h.subscription = of_subscription and h.key = d.key and h.state <> 'delayed'
                            and (h.state <> 'dead' or dead_blocks)
                        order by h.arrival
                        limit 1
                    )
                )
        ), claimed as (
            update @schema@.delivery as d
            set state = 'processing', owner = by_owner, claim = first_claim + h.number - 1, claimed_at = now_at
            from heads as h
            where d.subscription = of_subscription and d.position = h.position
            returning d.position
        )
        select coalesce(array_agg(c.position), '{}') into claimed from claimed as c;
        if cardinality(claimed) < cardinality(picked) then
            return query
            update @schema@.delivery as d
            set ready_at = case when d.key is null and d.state in ('pending', 'retrying') then greatest(d.due_at, now_at) end
            where d.subscription = of_subscription and d.position = any (picked) and d.owner is null
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
        d.position, coalesce(e.topic, k.topic), coalesce(e.type, k.type), coalesce(e.id, k.id), d.key,
        coalesce(e.payload, k.payload), coalesce(e.payload_bytes, k.payload_bytes), coalesce(e.content_type, k.content_type),
        coalesce(e.headers, k.headers), coalesce(e.stream_version, k.stream_version), coalesce(e.deliver_at, k.deliver_at),
        coalesce(e.created_at, k.created_at), d.claim, d.arrival, d.attempts, d.due_at, d.since, d.crashes, d.ready_at
    from @schema@.delivery as d
    left join @schema@.event as e on e.position = d.position
    left join @schema@.event_kept as k on k.position = d.position and e.position is null
    where d.subscription = of_subscription and d.position = any (told)
    order by d.claim;
end
$$;

-- Says of the first row of each of these keys that it is the first, unless that is known or somebody works on it; of how many.
-- Whoever ends rows and whoever adds rows behind others calls this after the commit: of two that do it at once, the later one sees
-- what the other did. Whoever has locked such a row calls this too.
create function @schema@.promote(subscriptions bigint[], keys text[]) returns bigint language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
    promoted bigint;
begin
    -- A hint; what is lost of it is found by claims.
    perform set_config('synchronous_commit', 'off', true);
    with heads as (
        select k.subscription, h.position
        from unnest(subscriptions, keys) as k (subscription, key)
        join @schema@.subscription as s on s.id = k.subscription
        cross join lateral (
            select d.position, d.state, d.owner, d.ready_at
            from @schema@.delivery as d
            where d.subscription = k.subscription and d.key = k.key and d.state <> 'delayed'
                and (d.state <> 'dead' or s.on_dead = 'block')
            order by d.arrival
            limit 1
        ) as h
        where h.ready_at is null and h.owner is null and h.state in ('pending', 'retrying')
    ), free as (
        select d.subscription, d.position
        from heads as h
        join @schema@.delivery as d on d.subscription = h.subscription and d.position = h.position
        where d.ready_at is null and d.owner is null and d.state in ('pending', 'retrying')
        for update of d skip locked
    )
    update @schema@.delivery as d
    set ready_at = greatest(d.due_at, clock_timestamp())
    from free as f
    where d.subscription = f.subscription and d.position = f.position;
    get diagnostics promoted = row_count;
    return promoted;
end
$$;

-- What changes tables for its caller is for those who were granted it.
revoke execute on function
    @schema@.dedup_claim(text, text, text, uuid), @schema@.dedup_rotate(), @schema@.append(text, bigint, jsonb, text),
    @schema@.claim_deliveries(bigint, integer, bigint, integer, boolean, integer, timestamptz, boolean), @schema@.promote(bigint[], text[])
from public;

-- The inbox: which events of other logs each consumer in this database has accepted.
create table @schema@.inbox (
    consumer text not null constraint consumer_has_1_to_1024_bytes check (octet_length(consumer) between 1 and 1024),
    id uuid not null,
    accepted_at timestamptz not null default clock_timestamp(),
    primary key (consumer, id)
);
-- Serves retention: what was accepted long ago.
create index inbox_accepted_at on @schema@.inbox (accepted_at);

-- Whether this consumer sees the event for the first time. Whoever accepts the same one at the same time waits until this
-- transaction ends; if it is rolled back, the event was never accepted.
create function @schema@.accept(consumer text, id uuid) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    insert into @schema@.inbox (consumer, id) values (consumer, id) on conflict do nothing;
    return found;
end
$$;
revoke execute on function @schema@.accept(text, uuid) from public;
