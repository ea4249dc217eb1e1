CREATE TABLE pillarbox_aside_count (
    subscription integer not null,
    state text not null,
    count integer not null,
    primary key (subscription, state)
) strict, without rowid;

CREATE TABLE pillarbox_cursor (
    subscription integer not null,
    lane integer not null,
    floor integer not null,
    settled text not null default '',
    anchor_position integer,
    anchor_id text,
    owner integer,
    epoch integer not null default 0,
    revision integer not null default 0,
    takeovers integer not null default 0,
    primary key (subscription, lane)
) strict, without rowid;

CREATE TABLE pillarbox_dead_range (
    low integer primary key,
    high integer not null,
    closed_at integer not null
) strict;

CREATE TABLE pillarbox_dedup (
    topic text not null,
    key text not null,
    dedup_key text not null,
    id text not null,
    created_at integer not null,
    primary key (topic, key, dedup_key)
) strict, without rowid;

CREATE TABLE pillarbox_delivery (
    subscription integer not null,
    position integer not null,
    lane integer not null,
    arrival integer not null,
    key text,
    state text not null check (state in ('pending', 'delayed', 'processing', 'retrying', 'dead')),
    attempts integer not null,
    due_at integer not null,
    since integer not null,
    died_at integer,
    errors text not null default '[]',
    -- Of a queue: the instance that works on it, the number that it gave this claim, and since when.
    owner integer,
    claim integer,
    claimed_at integer,
    -- Of a queue: when it became its key's turn, or when it is due if that is later; null while it is not its turn, and while
    -- somebody works on it.
    ready_at integer,
    -- How often it was taken from somebody who will not end it any more.
    crashes integer not null default 0,
    primary key (subscription, position)
) strict, without rowid;

CREATE TABLE pillarbox_event (
    position integer primary key autoincrement,
    id text not null default (lower(
        substr(printf('%012x', cast((julianday('now') - 2440587.5) * 86400000 + 0.5 as integer)), 1, 8)
        || '-' || substr(printf('%012x', cast((julianday('now') - 2440587.5) * 86400000 + 0.5 as integer)), 9, 4)
        || '-7' || substr(hex(randomblob(2)), 2)
        || '-' || substr('89ab', 1 + abs(random() % 4), 1) || substr(hex(randomblob(2)), 2)
        || '-' || hex(randomblob(6))
    )),
    topic text not null,
    key text,
    type text not null,
    payload any,
    content_type text,
    headers text not null default '{}',
    stream_version integer,
    deliver_at any,
    created_at integer not null default (cast((julianday('now') - 2440587.5) * 86400000 + 0.5 as integer)),
    constraint position_is_above_0 check (position > 0),
    -- Not the whole form of a uuid: that costs each insert a quarter of its time.
    constraint id_has_36_characters check (length(id) = 36),
    constraint topic_has_1_to_1024_bytes check (length(cast(topic as blob)) between 1 and 1024),
    constraint type_has_1_to_1024_bytes check (length(cast(type as blob)) between 1 and 1024),
    constraint key_has_1_to_1024_bytes check (key is null or length(cast(key as blob)) between 1 and 1024),
    constraint payload_is_json_text_or_a_blob check (
        payload is null
        or case typeof(payload) when 'text' then json_valid(payload) when 'blob' then 1 else 0 end
    ),
    -- A check and not a trigger that looks the limit up: a trigger costs each insert a third of its time.
    constraint payload_has_at_most_payload_bytes_max_bytes check (length(cast(payload as blob)) <= 1048576),
    constraint headers_is_a_json_object check (
        headers = '{}' or case json_valid(headers) when 1 then json_type(headers) = 'object' else 0 end
    ),
    constraint headers_has_at_most_65536_bytes check (length(cast(headers as blob)) <= 65536),
    constraint content_type_has_at_most_255_bytes check (length(cast(content_type as blob)) <= 255),
    constraint deliver_at_is_integer_milliseconds_since_1970 check (
        deliver_at is null or (typeof(deliver_at) = 'integer' and deliver_at between 0 and 253402300799999)
    ),
    constraint created_at_is_milliseconds_since_1970 check (created_at between 0 and 253402300799999)
) strict;

CREATE TABLE pillarbox_event_kept (
    position integer primary key,
    id text not null,
    topic text not null,
    key text,
    type text not null,
    payload any,
    content_type text,
    headers text not null,
    stream_version integer,
    deliver_at any,
    created_at integer not null
) strict;

CREATE TABLE pillarbox_inbox (
    consumer text not null,
    id text not null collate nocase,
    accepted_at integer not null default (cast((julianday('now') - 2440587.5) * 86400000 + 0.5 as integer)),
    primary key (consumer, id),
    constraint consumer_has_1_to_1024_bytes check (length(cast(consumer as blob)) between 1 and 1024),
    constraint id_has_36_characters check (length(id) = 36)
) strict, without rowid;

CREATE TABLE pillarbox_instance (
    id integer primary key,
    host text not null,
    pid integer not null,
    version text not null,
    beat integer not null default 0,
    started_at integer not null,
    beat_at integer not null,
    subscriptions text not null,
    report text not null default '{"subscriptions":{}}'
) strict;

CREATE TABLE pillarbox_meta (
    name text primary key,
    value any not null
) strict, without rowid;

CREATE TABLE pillarbox_migration (
    version integer primary key,
    name text not null,
    breaking integer not null,
    applied_at integer not null
) strict;

CREATE TABLE pillarbox_progress (
    id integer primary key,
    subscription integer not null,
    lane integer not null,
    epoch integer not null,
    floor_from integer not null,
    floor_to integer not null,
    started_at integer not null,
    ended_at integer not null
) strict;

CREATE TABLE pillarbox_recovery (
    subscription integer not null,
    cause text not null,
    count integer not null,
    last_at integer not null,
    primary key (subscription, cause)
) strict, without rowid;

CREATE TABLE pillarbox_skip (
    subscription integer not null,
    position integer not null,
    position_to integer not null,
    reason text not null,
    at integer not null,
    primary key (subscription, position)
) strict, without rowid;

CREATE TABLE pillarbox_stream (
    name text primary key,
    version integer not null
, topic text not null default 'journal') strict, without rowid;

CREATE TABLE pillarbox_subscription (
    id integer primary key autoincrement,
    name text not null unique,
    filter text not null,
    mode text not null,
    lanes integer not null,
    on_dead text not null,
    hold_ms integer,
    retry text not null,
    processing_timeout_ms integer not null,
    paused integer not null default 0,
    -- 'operator' or 'receiver', while it is paused.
    paused_by text,
    paused_reason text,
    defined_by integer not null,
    created_at integer not null
, definition integer not null default 1, former_filters text not null default '[]') strict;

CREATE INDEX pillarbox_dedup_created_at on pillarbox_dedup (created_at);

CREATE INDEX pillarbox_delivery_alive on pillarbox_delivery (subscription, lane, arrival) where died_at is null;

CREATE INDEX pillarbox_delivery_by_state on pillarbox_delivery (subscription, state, position);

CREATE INDEX pillarbox_delivery_dead on pillarbox_delivery (subscription, lane, key, arrival)
where died_at is not null and key is not null;

CREATE INDEX pillarbox_delivery_delayed on pillarbox_delivery (subscription, due_at) where state = 'delayed';

CREATE INDEX pillarbox_delivery_died_at on pillarbox_delivery (died_at) where died_at is not null;

CREATE INDEX pillarbox_delivery_key on pillarbox_delivery (subscription, key, state, arrival);

CREATE INDEX pillarbox_delivery_lane on pillarbox_delivery (subscription, lane, arrival);

CREATE INDEX pillarbox_delivery_owner on pillarbox_delivery (owner) where owner is not null;

CREATE INDEX pillarbox_delivery_position on pillarbox_delivery (position);

CREATE INDEX pillarbox_delivery_ready on pillarbox_delivery (subscription, ready_at, position, crashes)
where ready_at is not null;

CREATE INDEX pillarbox_event_id on pillarbox_event (id);

CREATE INDEX pillarbox_event_kept_id on pillarbox_event_kept (id);

CREATE UNIQUE INDEX pillarbox_event_stream on pillarbox_event (key, stream_version) where stream_version is not null;

CREATE INDEX pillarbox_inbox_accepted_at on pillarbox_inbox (accepted_at);

CREATE INDEX pillarbox_progress_lane on pillarbox_progress (subscription, lane);

CREATE VIEW pillarbox_delivery_state as
select
    d.subscription, d.position, d.lane, d.arrival, d.key, d.attempts, d.due_at, d.since, d.errors, d.owner, d.claimed_at,
    case
        when d.state = 'delayed' and d.due_at <= cast((julianday('now') - 2440587.5) * 86400000 + 0.5 as integer)
            then 'pending'
        when d.key is not null and d.state in ('pending', 'retrying') and (
            exists (
                select 1
                from pillarbox_delivery as head
                where head.subscription = d.subscription and head.key = d.key
                    and head.state in ('pending', 'processing', 'retrying') and head.arrival < d.arrival
            )
            or s.on_dead = 'block' and exists (
                select 1
                from pillarbox_delivery as head
                where head.subscription = d.subscription and head.key = d.key
                    and head.state = 'dead' and head.arrival < d.arrival
            )
        ) then 'blocked'
        else d.state
    end as state,
    d.state as stored
from pillarbox_delivery as d
join pillarbox_subscription as s on s.id = d.subscription;

CREATE VIEW pillarbox_journal as
select key as stream, stream_version as version, topic, type, payload, content_type, headers, id, position, created_at
from pillarbox_event
where stream_version is not null;

CREATE TRIGGER pillarbox_count_delete after delete on pillarbox_delivery when old.state in ('dead', 'delayed')
begin
    update pillarbox_aside_count set count = count - 1 where subscription = old.subscription and state = old.state;
end;

CREATE TRIGGER pillarbox_count_enter after update of state on pillarbox_delivery
when old.state <> new.state and new.state in ('dead', 'delayed')
begin
    insert into pillarbox_aside_count (subscription, state, count) values (new.subscription, new.state, 1)
    on conflict (subscription, state) do update set count = count + 1;
end;

CREATE TRIGGER pillarbox_count_insert after insert on pillarbox_delivery when new.state in ('dead', 'delayed')
begin
    insert into pillarbox_aside_count (subscription, state, count) values (new.subscription, new.state, 1)
    on conflict (subscription, state) do update set count = count + 1;
end;

CREATE TRIGGER pillarbox_count_leave after update of state on pillarbox_delivery
when old.state <> new.state and old.state in ('dead', 'delayed')
begin
    update pillarbox_aside_count set count = count - 1 where subscription = old.subscription and state = old.state;
end;

CREATE TRIGGER pillarbox_event_is_never_changed before update on pillarbox_event
begin
    select raise(abort, 'pillarbox: an event is never changed; publish another one');
end;

CREATE TRIGGER pillarbox_event_is_only_removed_by_retention before delete on pillarbox_event
when old.position > (select value from pillarbox_meta where name = 'pruned_to')
    or (
        old.stream_version is not null
        and old.position >= (select value from pillarbox_meta where name = 'log_start')
    )
begin
    select raise(abort, 'pillarbox: an event is only removed by retention; see `pillarbox prune` and `pillarbox reset`');
end;

CREATE TRIGGER pillarbox_journal_append instead of insert on pillarbox_journal
begin
    select raise(abort, 'pillarbox: an event of a stream needs stream, version and type; the first version is 1')
    where new.stream is null or instr(new.stream, char(0)) > 0 or new.version is null or new.type is null;
    select raise(abort, 'pillarbox: PB409: the stream is not at the version before this one; roll back, load the stream and decide again')
    where new.version <> 1 + coalesce((select version from pillarbox_stream where name = new.stream), 0);
    select raise(abort, 'pillarbox: the stream has another topic; a stream has one topic')
    from pillarbox_stream
    where name = new.stream and topic <> coalesce(new.topic, 'journal');
    insert into pillarbox_event (topic, key, type, payload, content_type, headers, stream_version)
    select
        coalesce(new.topic, 'journal'), new.stream, new.type, new.payload, new.content_type, coalesce(new.headers, '{}'),
        new.version
    where new.id is null;
    insert into pillarbox_event (id, topic, key, type, payload, content_type, headers, stream_version)
    select
        new.id, coalesce(new.topic, 'journal'), new.stream, new.type, new.payload, new.content_type,
        coalesce(new.headers, '{}'), new.version
    where new.id is not null;
    insert into pillarbox_stream (name, version, topic) values (new.stream, new.version, coalesce(new.topic, 'journal'))
    on conflict (name) do update set version = excluded.version;
end;
