-- The log: events, and the copies of them that deliveries still need. The statement of a scan of one stretch is in scan.sql.

-- name: horizon
-- The highest position handed out, and a time before it was read. Not `select last_value`: that can be up to 32 ahead of the
-- truth.
select coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) as horizon, statement_timestamp() as now

-- name: writers
-- Every INSERT takes this lock on the parent before it draws its position and keeps it until its rows are visible. A holder
-- without a transaction number is already visible and about to let go. Whether it is prepared, and since when it is idle as
-- far as this role may know.
select
    l.virtualtransaction, l.pid is null as prepared,
    case when a.state like 'idle in transaction%' then a.state_change end as idle_since, clock_timestamp() as looked_at
from pg_locks as l
left join lateral pg_stat_get_activity(coalesce(l.pid, -1)) as a on true
where l.locktype = 'relation'
    and l.database = (select oid from pg_database where datname = current_database())
    and l.relation = 'event'::regclass
    and l.mode = 'RowExclusiveLock'
    and l.granted
    and l.virtualtransaction not like '%/0'

-- name: scan_many
-- Several stretches of the log in one snapshot; see scan.sql. The columns are read by their positions too.
select
    e.position, e.topic, e.type, e.id, e.key,
    case when $4 or e.topic = any($5) or e.topic like any($6) then e.payload end,
    case when $4 or e.topic = any($5) or e.topic like any($6) then e.payload_bytes end,
    case when $4 or e.topic = any($5) or e.topic like any($6) then e.content_type end,
    case when $4 or e.topic = any($5) or e.topic like any($6) then e.headers end,
    e.stream_version, e.deliver_at, e.created_at,
    s.number
from unnest($1::bigint[], $2::bigint[], $3::bigint[]) with ordinality as s (after, upto, rows, number)
cross join lateral (
    select * from event where position > s.after and position <= s.upto order by position limit s.rows
) as e

-- name: fetch
-- Position by position (`offset 0`): each is looked for in its own leaf. Of an array, all are looked for in every leaf.
select
    w.position, coalesce(e.topic, k.topic), coalesce(e.type, k.type), coalesce(e.id, k.id, event_id(e.position, e.created_at)), coalesce(e.key, k.key),
    coalesce(e.payload, k.payload), coalesce(e.payload_bytes, k.payload_bytes), coalesce(e.content_type, k.content_type),
    coalesce(e.headers, k.headers), coalesce(e.stream_version, k.stream_version), coalesce(e.deliver_at, k.deliver_at),
    coalesce(e.created_at, k.created_at)
from (select distinct unnest($1::bigint[]) as position) as w
left join lateral (select * from event where position = w.position offset 0) as e on true
left join lateral (select * from event_kept where e.position is null and position = w.position offset 0) as k on true
where e.position is not null or k.position is not null

-- name: sizes
-- What the events at these positions take in the table. Nothing of them is read from where large values lie. Position by position, as `fetch`.
select w.position, coalesce(e.bytes, k.bytes) as bytes
from (select distinct unnest($1::bigint[]) as position) as w
left join lateral (
    select
        (
            coalesce(pg_column_size(payload), 0) + coalesce(pg_column_size(payload_bytes), 0) + coalesce(pg_column_size(headers), 0)
        )::bigint as bytes
    from event
    where position = w.position
    offset 0
) as e on true
left join lateral (
    select
        (
            coalesce(pg_column_size(payload), 0) + coalesce(pg_column_size(payload_bytes), 0) + coalesce(pg_column_size(headers), 0)
        )::bigint as bytes
    from event_kept
    where e.bytes is null and position = w.position
    offset 0
) as k on true
where e.bytes is not null or k.bytes is not null

-- name: visible_ranges
-- What one snapshot shows of a stretch of the log, as ranges.
select min(position) as low, max(position) as high
from (
    select position, position - row_number() over (order by position) as island
    from event
    where position > $1 and position <= $2
) as visible
group by island

-- name: backlog
select position, topic, type, key, deliver_at, created_at, coalesce(id, event_id(position, created_at)) as id
from event
where position > $1::bigint
    and ($2::text is null or key = $2)
    and ($3::text is null or topic = $3)
    and ($4::text is null or starts_with(topic, $4))
    and ($5::text is null or headers ->> 'correlationid' = $5)
order by position
limit $6::bigint

-- name: key_events
-- With whether the subscription $3 has a row for it.
select
    e.position, coalesce(e.id, event_id(e.position, e.created_at)) as id, e.topic, e.type,
    exists (select from delivery as d where d.subscription = $3::bigint and d.position = e.position) as has_delivery
from event as e
where e.position > $1::bigint and e.key = $2::text
order by e.position

-- name: positions_of
-- An id that a publisher brought is found by the index, whose predicate is repeated for that; any other says its position.
select position
from event
where id = $1::uuid
    and is_well_formed(topic, type, key, payload, payload_bytes, content_type, headers, created_at)
union
select position
from event
where position = (($2::bigint - (select id_salt from meta)) & 4611686018427387903) and id is null
    and event_id(position, created_at) = $1
union
select position from event_kept where id = $1
order by position

-- name: version_id
select coalesce(e.id, k.id, event_id(e.position, e.created_at))
from journal as j
left join event as e on e.position = j.position
left join event_kept as k on k.position = j.position
where j.stream = $1::text and j.version = $2::bigint and (e.position is not null or k.position is not null)

-- name: published
-- What this transaction has written and not committed: visible, and by a transaction that has not ended. Savepoints have
-- transactions of their own, numbered above it; created_at keeps numbers of an earlier round out.
select
    position, topic, type, coalesce(id, @schema@.event_id(position, created_at)), key, payload, payload_bytes, content_type, headers, stream_version, deliver_at, created_at
from (
    select e.*, own.id::text::bigint + ((e.xmin::text::bigint - own.id::text::bigint) & 4294967295) as writer
    from @schema@.event as e
    cross join (select pg_current_xact_id_if_assigned()) as own (id)
    where own.id is not null and e.created_at >= now() and (e.xmin::text::bigint - own.id::text::bigint) & 2147483648 = 0
) as e
where pg_xact_status(writer::text::xid8) = 'in progress'
order by position

-- name: next_of
-- Whether the next event above $1 is older than $2; of the log or of what is kept aside.
select position, created_at < $2 as is_older from @table@ where position > $1 order by position limit 1

-- name: first_since_of
select position from @table@ where position > $1 and position <= $2 and created_at >= $3 order by position limit 1

-- name: kept_last
select coalesce(max(position), 0) from event_kept

-- name: holes
-- Stretches between visible events above $1, at most $2 events on, and what lies above the last of them.
select previous + 1 as low, position - 1 as high
from (
    select position, lag(position, 1, $1::bigint) over (order by position) as previous
    from (select position from event where position > $1 order by position limit $2::bigint) as visible
) as neighbours
where position > previous + 1
order by 1

-- name: looked_through
-- How many of the next $2 events above $1 there are, and the last of them.
select max(position) as last, count(*) as count
from (select position from event where position > $1 order by position limit $2) as visible

-- name: figures
-- Bytes, events kept aside, events. What is many is not counted: of the kept the server's estimate is told; of a large log its positions are, without those that are closed.
select
    pg_total_relation_size('event_kept'::regclass)
        + (select coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint from pg_inherits where inhparent = 'event'::regclass) as bytes,
    (
        select case
            when count(*) < $3 then count(*)
            else greatest(count(*), (select reltuples::bigint from pg_class where oid = 'event_kept'::regclass))
        end
        from (select from event_kept limit $3) as kept
    ) as kept,
    case
        when $2::bigint - $1::bigint < $3::bigint then (select count(*) from event)
        else $2 - $1 + 1 - (
            select coalesce(sum(least(high, $2) - greatest(low, $1) + 1), 0)::bigint
            from dead_range
            where high >= $1 and low <= $2
        )
    end as events

-- name: last_value
-- For a mutant: it can be ahead of the truth.
select case when is_called then last_value else 0 end from event_position_seq
