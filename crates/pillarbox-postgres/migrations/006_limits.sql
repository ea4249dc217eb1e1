-- breaking: no
-- Headers and content types have limits too, and a payload's limit is its own size, wherever the value comes from.

-- Refuses with the name of what was violated. A payload's size in memory has four bytes of its own: no cast, no copy. That is not so for
-- a value that PostgreSQL has compressed in another table (insert into … select …): only such a one is unpacked and measured.
create function @schema@.is_well_formed(
    topic text, type text, key text, payload json, payload_bytes bytea, content_type text, headers jsonb
) returns boolean language plpgsql stable parallel safe as $$
declare
    payload_size integer;
begin
    -- As few steps as will do: PostgreSQL prepares them anew in each transaction.
    if topic <> '' and type <> '' and key is distinct from ''
        and greatest(octet_length(topic), octet_length(type), octet_length(key)) <= 1024
        and coalesce(octet_length(content_type), 0) <= 255
        and (payload is null or payload_bytes is null)
        and greatest(pg_column_size(payload) - 4, octet_length(payload_bytes), 0) <= @schema@.payload_bytes_max()
        and headers @> '{}' and pg_column_size(headers) <= 65540
        and coalesce(pg_column_compression(payload), pg_column_compression(headers)) is null
    then
        return true;
    end if;
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
            hint = 'Leave the key out (null) if the event has none.';
    elsif octet_length(content_type) > 255 then
        raise check_violation using constraint = 'content_type_has_at_most_255_bytes',
            message = 'content_type_has_at_most_255_bytes: the content type has ' || octet_length(content_type) || ' bytes';
    elsif payload is not null and payload_bytes is not null then
        raise check_violation using constraint = 'payload_or_payload_bytes',
            message = 'payload_or_payload_bytes: an event has JSON or bytes, not both';
    elsif jsonb_typeof(headers) is distinct from 'object' then
        raise check_violation using constraint = 'headers_is_a_json_object',
            message = 'headers_is_a_json_object: headers is ' || coalesce(jsonb_typeof(headers), 'null');
    elsif (
        case when pg_column_compression(headers) is null then pg_column_size(headers) - 4 else octet_length(headers::text) end
    ) > 65536 then
        raise check_violation using constraint = 'headers_has_at_most_65536_bytes',
            message = 'headers_has_at_most_65536_bytes: the headers have ' || octet_length(headers::text) || ' bytes as text',
            hint = 'Put it into the payload.';
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

-- Whoever may publish still may: a role that was granted the old function gets the new one.
do $$
declare
    grantee text;
begin
    for grantee in
        select case g.grantee when 0 then 'public' else format('%I', r.rolname) end
        from pg_proc as p
        cross join lateral aclexplode(p.proacl) as g
        left join pg_roles as r on r.oid = g.grantee
        where p.oid = '@schema@.is_well_formed(text, text, text, json, bytea, jsonb)'::regprocedure
            and g.grantee <> p.proowner
    loop
        execute format(
            'grant execute on function @schema@.is_well_formed(text, text, text, json, bytea, text, jsonb) to %s', grantee
        );
    end loop;
end
$$;

-- Of new events alone: what is there stays, and is delivered.
alter table @schema@.event drop constraint event_is_well_formed;
alter table @schema@.event add constraint event_is_well_formed check (
    @schema@.is_well_formed(topic, type, key, payload, payload_bytes, content_type, headers)
) not valid;
drop function @schema@.is_well_formed(text, text, text, json, bytea, jsonb);
