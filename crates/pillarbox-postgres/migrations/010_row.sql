-- breaking: yes
-- What publishing costs: the row, its check and its indexes. An id that nobody brought is not stored but follows from the row; the check is one
-- function, called by the predicate of an index, which PostgreSQL keeps parsed, where it reads a check of the table anew for each statement; a
-- journal has a table of its own instead of an index of the log. Names of functions, operators and types are written out where publishers
-- and readers call them, so that no search_path leads to others.

-- Tells the ids of this log from those of others. Goes with the events wherever they are copied to.
alter table @schema@.meta add column id_salt bigint not null default 0;

-- What the ids of two logs differ by.
create function @schema@.random_id_salt() returns bigint language sql volatile as $$
    select ('x' || encode(substring(uuid_send(gen_random_uuid()) from 1 for 8), 'hex'))::bit(64)::bigint & 2305843009213693951
$$;

-- Gives the log a salt of its own: the ids of events that brought none change, so that no relay may run meanwhile. For the owner, and for a
-- log that delivers nothing old. An id is of version 7, from the time and the position.
create function @schema@.set_id_salt(salt bigint) returns void language plpgsql as $do$
begin
    execute format($sql$
        create or replace function @schema@.event_id("position" bigint, created_at timestamptz)
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
    update @schema@.meta set id_salt = salt;
end
$do$;
select @schema@.set_id_salt(@schema@.random_id_salt());
alter function @schema@.new_id() set search_path = pg_catalog, pg_temp;

-- Which position each version of a stream has. Serves reading a stream, `requeue` by version, and retention, which leaves a journal's leaves
-- alone. Empty where nobody appends.
create table @schema@.journal (
    stream text not null,
    version bigint not null,
    position bigint not null,
    primary key (stream, version)
);
create unique index journal_position on @schema@.journal (position);
insert into @schema@.journal (stream, version, position)
select key, stream_version, position from @schema@.event where stream_version is not null and key is not null order by position
on conflict do nothing;
drop index @schema@.event_stream;

-- What was published up to this moment is not looked at by the check, since an index is also made anew over old events and a limit is for new
-- ones: events of before this step, and those that a larger limit allowed.
create function @schema@.checked_since() returns timestamptz language sql immutable parallel safe as 'select null::timestamptz';

-- Changes how large a payload may be. For the owner. Sessions see it with their next statement.
create function @schema@.set_payload_bytes_max(size integer) returns void language plpgsql as $do$
declare
    -- Times and positions rise together, but for a clock that was set back.
    newest constant timestamptz := greatest(clock_timestamp(), (
        select max(e.created_at) from (select created_at from @schema@.event order by position desc limit 1000) as e
    ));
begin
    execute format(
        'create or replace function @schema@.checked_since() returns timestamptz language sql immutable parallel safe as %L',
        format('select pg_catalog.to_timestamp(%s::pg_catalog.float8)', extract(epoch from newest))
    );
    execute format(
        'create or replace function @schema@.payload_bytes_max() returns integer language sql immutable parallel safe as %L',
        'select ' || size
    );
    update @schema@.meta set payload_bytes_max = size;
end
$do$;
select @schema@.set_payload_bytes_max(payload_bytes_max) from @schema@.meta;

-- Refuses with the name of what was violated.
create function @schema@.refuse_event(
    topic text, type text, key text, payload json, payload_bytes bytea, content_type text, headers jsonb
)
returns boolean language plpgsql stable parallel safe set search_path = pg_catalog, pg_temp as $$
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
    elsif payload_size > @schema@.payload_bytes_max() then
        raise check_violation using constraint = 'payload_has_at_most_payload_bytes_max_bytes',
            message = format(
                'payload_has_at_most_payload_bytes_max_bytes: the payload has %s bytes, more than payload_bytes_max = %s',
                payload_size, @schema@.payload_bytes_max()
            ),
            hint = 'Store it elsewhere and publish a reference.';
    end if;
    return true;
end
$$;

-- True, or it refuses. The first look is for nearly all new events, the third for those with bytes, a content type or no payload; each is
-- one expression, which costs less than several. A name has 1 to 1024 bytes if no bit above the lowest ten is set in its length less
-- one. The size of a stored value is known without reading it; one that came compressed out of another table is larger than it
-- looks. It is said to be immutable since an index calls it: for a row that is in the log it is always true.
create function @schema@.is_well_formed(
    topic text, type text, key text, payload json, payload_bytes bytea, content_type text, headers jsonb, created_at timestamptz
)
returns boolean language plpgsql immutable parallel safe as $$
begin
    if payload_bytes is null and content_type is null
        and (
            (pg_catalog.octet_length(topic) operator(pg_catalog.-) 1)
            operator(pg_catalog.|) (pg_catalog.octet_length(type) operator(pg_catalog.-) 1)
            operator(pg_catalog.|) coalesce(pg_catalog.octet_length(key) operator(pg_catalog.-) 1, 0)
        ) operator(pg_catalog.>>) 10 operator(pg_catalog.=) 0
        and pg_catalog.pg_column_size(payload) operator(pg_catalog.<=) @schema@.payload_bytes_max()
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
    if created_at operator(pg_catalog.<=) @schema@.checked_since() then
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
            operator(pg_catalog.<=) @schema@.payload_bytes_max()
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
    return @schema@.refuse_event(topic, type, key, payload, payload_bytes, content_type, headers);
end
$$;

alter table @schema@.event
    drop constraint event_is_well_formed,
    alter column id drop not null,
    alter column id drop default,
    alter column headers drop not null,
    alter column headers drop default;
drop index @schema@.event_id;
-- Serves `show` and every command that names an event by an id that its publisher brought; one index a leaf. The first half of the predicate is
-- the check: it is true or fails.
create index event_id on @schema@.event (id) where
    @schema@.is_well_formed(topic, type, key, payload, payload_bytes, content_type, headers, created_at)
    and id is not null;
comment on index @schema@.event_id is 'Checks each event that is published. It looks unused, and must not be dropped.';

-- Whoever may publish, relay or look on still may: they call what an insert, or a look for an id, calls, also where not everybody may call
-- what is new; the id of an event that brought none is told by its position and its time; and who reads the log reads journals.
do $$
declare
    may record;
begin
    for may in
        select
            case g.grantee when 0 then 'public' else format('%I', r.rolname) end as grantee,
            bool_or(g.privilege_type = 'SELECT') as reads
        from (
            select c.relowner, c.relacl from pg_class as c where c.oid = '@schema@.event'::regclass
            union all
            select c.relowner, a.attacl
            from pg_attribute as a
            join pg_class as c on c.oid = a.attrelid
            where a.attrelid = '@schema@.event'::regclass and a.attname = 'topic'
        ) as granted (owner, acl)
        cross join lateral aclexplode(granted.acl) as g
        left join pg_roles as r on r.oid = g.grantee
        where g.privilege_type in ('INSERT', 'SELECT') and g.grantee <> granted.owner
        group by 1
    loop
        execute format('grant select (position, id, created_at) on @schema@.event to %s', may.grantee);
        execute format('grant execute on function
            @schema@.is_well_formed(text, text, text, json, bytea, text, jsonb, timestamptz),
            @schema@.refuse_event(text, text, text, json, bytea, text, jsonb),
            @schema@.payload_bytes_max(), @schema@.checked_since(), @schema@.event_id(bigint, timestamptz) to %s', may.grantee);
        if may.reads then
            execute format('grant select on @schema@.journal to %s', may.grantee);
        end if;
    end loop;
end
$$;
drop function @schema@.is_well_formed(text, text, text, json, bytea, text, jsonb);

-- The id is made of what was written, after the insert: as a part of it, the expression was prepared for the leaf anew each time. JSON out of
-- `jsonb` is not read once more, and headers that are empty are not stored.
create or replace function @schema@.publish(
    topic text, type text, payload jsonb default null, key text default null, headers jsonb default '{}',
    deliver_at timestamptz default null, dedup_key text default null, id uuid default null, ordered boolean default false
) returns uuid language plpgsql as $$
declare
    first_id uuid;
    written_position bigint;
    written_at timestamptz;
begin
    -- The rest costs nothing where there is nothing of it to do.
    if ordered or dedup_key is not null then
        if ordered then
            perform @schema@.order_key(key);
        end if;
        if dedup_key is not null then
            id := coalesce(id, @schema@.new_id());
            first_id := @schema@.dedup_claim(topic, key, dedup_key, id);
            if first_id is not null then
                return first_id;
            end if;
        end if;
    end if;
    insert into @schema@.event as e (id, topic, key, type, payload, headers, deliver_at)
    values (id, topic, key, type, pg_catalog.to_json(payload), nullif(headers, '{}'), deliver_at)
    returning e.position, e.created_at into written_position, written_at;
    return coalesce(id, @schema@.event_id(written_position, written_at));
end
$$;

create or replace function @schema@.publish_bytes(
    topic text, type text, payload bytea, content_type text, key text default null, headers jsonb default '{}',
    deliver_at timestamptz default null, dedup_key text default null, id uuid default null, ordered boolean default false
) returns uuid language plpgsql as $$
declare
    first_id uuid;
    written_position bigint;
    written_at timestamptz;
begin
    -- The rest costs nothing where there is nothing of it to do.
    if ordered or dedup_key is not null then
        if ordered then
            perform @schema@.order_key(key);
        end if;
        if dedup_key is not null then
            id := coalesce(id, @schema@.new_id());
            first_id := @schema@.dedup_claim(topic, key, dedup_key, id);
            if first_id is not null then
                return first_id;
            end if;
        end if;
    end if;
    insert into @schema@.event as e (id, topic, key, type, payload_bytes, content_type, headers, deliver_at)
    values (id, topic, key, type, payload, content_type, nullif(headers, '{}'), deliver_at)
    returning e.position, e.created_at into written_position, written_at;
    return coalesce(id, @schema@.event_id(written_position, written_at));
end
$$;

-- The head of the stream is locked before the first position is drawn: version order is position order is commit order.
create or replace function @schema@.append(
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
    with appended as (
        insert into @schema@.event (id, topic, key, type, payload, headers, stream_version)
        select
            (e.event ->> 'id')::uuid, append.topic, append.stream, e.event ->> 'type', (e.event -> 'payload')::json,
            e.event -> 'headers', found_version + e.ordinality
        from jsonb_array_elements(append.events) with ordinality as e (event, ordinality)
        order by e.ordinality
        returning position, stream_version
    )
    insert into @schema@.journal (stream, version, position)
    select append.stream, a.stream_version, a.position from appended as a;
    return new_version;
end
$$;

create or replace view @schema@.event_view as
select
    position, coalesce(id, @schema@.event_id(position, created_at)) as id, created_at, topic, key, type,
    coalesce(payload::text, encode(payload_bytes, 'escape')) as payload,
    coalesce(content_type, case when payload is not null then 'application/json' end) as content_type,
    coalesce(headers, '{}') as headers, stream_version, deliver_at
from @schema@.event
union all
select
    position, id, created_at, topic, key, type,
    coalesce(payload::text, encode(payload_bytes, 'escape')) as payload,
    coalesce(content_type, case when payload is not null then 'application/json' end) as content_type,
    headers, stream_version, deliver_at
from @schema@.event_kept;

-- As before, but for where it looks for events of a journal, and it refuses an old snapshot, which does not show what was published since.
create or replace function @schema@.empty_leaf(name text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
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
        raise exception 'must be owner of schema @schema@ (%, or a member of it) to remove events that nobody has received', current_user
            using errcode = 'insufficient_privilege';
    end if;
    -- Whoever rewinds or subscribes waits, or has lowered the floor that is read below.
    select m.retention_keep_ms into keep_ms from @schema@.meta as m for update;
    -- One that is still to be published into is not to be used elsewhere.
    update @schema@.leaf
    set emptied = coalesce(high <= pg_sequence_last_value('@schema@.event_position_seq'::regclass) + 1, false)
    where leaf.name = empty_leaf.name;
    if not found then
        raise exception 'there is no leaf %', name using errcode = 'undefined_table';
    end if;
    -- Nothing appears in it from here on.
    execute format('lock table only @schema@.%I in access exclusive mode', name);
    execute format('select min(position), max(position) from @schema@.%I', name) into first, last;
    if last is null then
        return;
    end if;
    execute format('select created_at from @schema@.%I where position = $1', name) into newest using last;
    select min(c.floor) into floor from @schema@.cursor as c;
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
         from @schema@.subscription as s
         cross join lateral (
             select position from @schema@.delivery where subscription = s.id and position >= $1 and position <= $2
         ) as d
         where exists (select from @schema@.%I as e where e.position = d.position)
             and not exists (select from @schema@.event_kept as k where k.position = d.position)', name
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
        if exists (select from @schema@.journal as j where j.position >= first and j.position <= last) then
            raise exception 'leaf % has events of a journal', name using errcode = 'object_not_in_prerequisite_state';
        end if;
    end if;
    execute format('truncate table @schema@.%I', name);
    delete from @schema@.journal as j where j.position >= first and j.position <= last;
end
$$;
