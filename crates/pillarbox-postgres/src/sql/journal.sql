-- The journal, for typed parameters of tokio-postgres and for clients that bind nothing but texts, bytes and numbers.

-- name: append
select @schema@.append_events($1, $2, $3, $4, $5, $6, $7, $8, $9)

-- name: append_text
select @schema@.append_events(
    $1::text, $2::bigint, $3::text, $4::text[]::uuid[], $5::text[], $6::text[]::json[], $7::bytea[], $8::text[],
    $9::text[]::jsonb[]
)

-- name: head
select version from @schema@.stream where name = $1::text

-- name: read
-- Position by position (`offset 0`): each is looked for in its own leaf.
select
    e.position, e.topic, e.type, coalesce(e.id, @schema@.event_id(e.position, e.created_at))::text, e.key, e.payload::text,
    e.payload_bytes, e.content_type, e.headers::text, e.stream_version,
    floor(extract(epoch from e.created_at) * 1000)::bigint
from @schema@.journal as j
cross join lateral (select * from @schema@.event where position = j.position offset 0) as e
where j.stream = $1::text and j.version between $2::bigint and $3::bigint
order by j.version
limit $4::bigint

-- name: streams
select name, topic, version
from @schema@.stream
where name > $2::text and starts_with(name, $1::text)
order by name
limit $3::bigint
