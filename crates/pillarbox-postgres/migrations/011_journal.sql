-- breaking: no
-- The journal: a stream has one topic, so that a filter of topics wants all of it or nothing; an append needs one statement for a stream that
-- exists; payloads of bytes, and JSON byte for byte, for clients with arrays.

-- A stream without events was made by an append of nothing, which is refused now. Of a stream with several topics the newest is kept.
delete from @schema@.stream as s where not exists (select from @schema@.journal as j where j.stream = s.name);
alter table @schema@.stream add column topic text;
update @schema@.stream as s
set topic = coalesce(
    (
        select e.topic
        from @schema@.journal as j
        join @schema@.event as e on e.position = j.position
        where j.stream = s.name
        order by j.version desc
        limit 1
    ),
    'journal'
);
alter table @schema@.stream alter column topic set not null;

-- The head of the stream is locked before the first position is drawn: version order is position order is commit order.
create function @schema@.append_events(
    stream text,
    expected_version bigint,
    topic text,
    ids uuid[],
    types text[],
    payloads json[],
    payload_bytes bytea[],
    content_types text[],
    headers jsonb[]
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
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
        update @schema@.stream as s
        set version = s.version + added
        where s.name = append_events.stream
            and s.topic = append_events.topic
            and (expected_version is null or s.version = expected_version)
        returning s.version - added into found_version;
        exit when found;
        if expected_version is null or expected_version = 0 then
            insert into @schema@.stream as s (name, version, topic) values (stream, added, append_events.topic)
            on conflict (name) do nothing;
            if found then
                found_version := 0;
                exit;
            end if;
        end if;
        select s.version, s.topic into found_version, found_topic from @schema@.stream as s where s.name = append_events.stream;
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
        insert into @schema@.event
            (id, topic, key, type, payload, payload_bytes, content_type, headers, stream_version)
        select
            e.id, append_events.topic, append_events.stream, e.type, e.payload, e.payload_bytes, e.content_type, e.headers,
            found_version + e.ordinality
        from unnest(ids, types, payloads, append_events.payload_bytes, content_types, append_events.headers) with ordinality
            as e (id, type, payload, payload_bytes, content_type, headers, ordinality)
        order by e.ordinality
        returning position, stream_version
    )
    insert into @schema@.journal (stream, version, position)
    select append_events.stream, a.stream_version, a.position from appended as a;
    return found_version + added;
end
$$;

create or replace function @schema@.append(
    stream text,
    expected_version bigint,
    events jsonb,
    topic text default 'journal'
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
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
    return @schema@.append_events(stream, expected_version, topic, ids, types, payloads, null, null, headers);
end
$$;

revoke execute on function
    @schema@.append_events(text, bigint, text, uuid[], text[], json[], bytea[], text[], jsonb[])
from public;
-- A role that may append still may.
do $do$
declare
    grantee text;
begin
    for grantee in
        select case g.grantee when 0 then 'public' else format('%I', r.rolname) end
        from pg_proc as p
        cross join lateral aclexplode(p.proacl) as g
        left join pg_roles as r on r.oid = g.grantee
        where p.oid = '@schema@.append(text, bigint, jsonb, text)'::regprocedure and g.grantee <> p.proowner
    loop
        execute format(
            'grant execute on function
                @schema@.append_events(text, bigint, text, uuid[], text[], json[], bytea[], text[], jsonb[]) to %s', grantee
        );
    end loop;
end
$do$;
