-- What retention looks for and removes.

-- name: lock_limits
select retention_keep_ms, retention_dead_ms, retention_inbox_ms, clock_timestamp() as now from meta for update

-- name: limits
select retention_keep_ms, retention_dead_ms, retention_inbox_ms, clock_timestamp() as now from meta

-- name: has_subscription
select exists (select from subscription)

-- name: floors
select s.name, min(c.floor) as floor, s.hold_ms, clock_timestamp() as now
from cursor as c
join subscription as s on s.id = c.subscription
group by s.id

-- name: furthest_behind
-- Who is furthest behind.
select s.name, min(c.floor) as floor
from cursor as c
join subscription as s on s.id = c.subscription
group by s.id
order by 2, 1
limit 1

-- name: first_since
select position from event where position > $1 and created_at >= $2 order by position limit 1

-- name: last_above
select coalesce(max(position), $1) from event where position > $1

-- name: next_time
select created_at from event where position > $1 order by position limit 1

-- name: horizon
-- The horizon and the time.
select coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) as horizon, clock_timestamp() as now

-- name: leaves_with_events
-- Each leaf that has events: its bounds, the last position, when that was published, and whether a journal has any of it.
select
    l.low, coalesce(l.high, 9223372036854775807) as high, e.position, e.created_at,
    (
        select j.position
        from journal as j
        where j.position >= l.low and j.position < coalesce(l.high, 9223372036854775807)
        limit 1
    ) is not null as is_journal
from leaf as l
cross join lateral (
    select e.position, e.created_at
    from event as e
    where e.position >= l.low and e.position < coalesce(l.high, 9223372036854775807)
    order by e.position desc
    limit 1
) as e
where not l.emptied
order by l.low

-- name: full_leaf
-- The lowest leaf that is full and has no event of a journal, and when its last event was published.
select
    l.name, l.low, l.high,
    (
        select e.created_at
        from event as e
        where e.position >= l.low and e.position < l.high
        order by e.position desc
        limit 1
    ) as newest
from leaf as l
where not l.emptied
    and l.high <= $1::bigint + 1
    -- Not as an anti join, which would gather all events of all journals.
    and (
        select j.position
        from journal as j
        where j.position >= l.low and j.position < l.high
        limit 1
    ) is null
order by l.low
limit 1

-- name: count_events
select count(*) from event where position >= $1 and position < $2

-- name: count_dead
select count(*) from delivery where died_at < $1

-- name: keep
-- Copies what deliveries still need of a leaf.
insert into event_kept (
    position, id, topic, key, type, payload, payload_bytes, content_type, headers, stream_version, deliver_at, created_at
)
select
    position, coalesce(id, event_id(position, created_at)), topic, key, type, payload, payload_bytes, content_type,
    coalesce(headers, '{}'), stream_version, deliver_at, created_at
from event
where position >= $1::bigint and position < $2::bigint
    and position in (
        -- Subscription by subscription, by the index of the primary key.
        select d.position
        from subscription as s
        cross join lateral (
            select position from delivery where subscription = s.id and position >= $1 and position < $2
        ) as d
    )
on conflict (position) do nothing

-- name: advance
-- What is left below a leaf that is about to be emptied is a journal's; the log still begins there.
update meta
set log_start = coalesce((select min(position) from event where position < $1::bigint), $2::bigint),
    pruned_to = greatest(pruned_to, $2 - 1)

-- name: prune_dead_ranges
delete from dead_range where high <= (select pruned_to from meta)

-- name: prune_kept
-- Removes those of the next $2 copies above $1 that no delivery needs: how many copies were looked at, the last of them, and how many went.
with looked as materialized (
    select position from event_kept where position > $1::bigint order by position limit $2::bigint
), gone as (
    delete from event_kept as k
    using looked as l
    where k.position = l.position
        -- Each by itself, subscription by subscription. Not as an anti join, which might read all deliveries.
        and (
            select true
            from subscription as s
            cross join lateral (
                select from delivery as d where d.subscription = s.id and d.position = l.position offset 0
            ) as needed
            limit 1
        ) is null
    returning k.position
)
select
    (select count(*) from looked) as looked_at, (select max(position) from looked) as last,
    (select count(*) from gone) as removed

-- name: dead
select subscription, position, lane
from delivery
where died_at < $1::timestamptz
order by died_at
limit $2::bigint

-- name: prune_dead
-- Those that an operator has called back meanwhile are not dead any more.
delete from delivery as d
using unnest($1::bigint[], $2::bigint[]) as w (subscription, position)
where d.subscription = any (array[w.subscription]) and d.position = w.position and d.died_at < $3::timestamptz
returning d.subscription, d.position, case when d.queued then d.key end as key

-- name: prune_skips
-- What was given up before $1 and is gone, except for a journal's events, which stay.
delete from skip as s
where s.position_to <= (select pruned_to from meta)
    and s.at < $1::timestamptz
    and (
        select e.position
        from event as e
        where e.position >= s.position and e.position <= s.position_to
        order by e.position
        limit 1
    ) is null

-- name: prune_progress
-- Records about pruned events, except for the newest of each lane, and for what is said about a journal's events that stay.
delete from progress as p
where p.floor_to < (select pruned_to from meta)
    and exists (select from progress as n where n.subscription = p.subscription and n.lane = p.lane and n.id > p.id)
    -- Not as an anti join, which might read all of the log.
    and (
        select e.position
        from event as e
        where e.position > p.floor_from and e.position <= p.floor_to
        order by e.position
        limit 1
    ) is null

-- name: merge_progress
-- Old records that follow each other without a gap become one an hour.
with groups as (
    select
        min(id) as first, array_agg(id) as ids, min(floor_from) as floor_from, max(floor_to) as floor_to,
        max(ended_at) as ended_at
    from progress
    where ended_at < clock_timestamp() - interval '1 hour' and epoch > 0
    group by subscription, lane, epoch, date_trunc('hour', started_at)
    having count(*) > 1 and sum(floor_to - floor_from) = max(floor_to) - min(floor_from)
    limit $1::bigint
), gone as (
    delete from progress as p using groups as g where p.id = any (g.ids) and p.id <> g.first
)
update progress as p
set floor_from = g.floor_from, floor_to = g.floor_to, ended_at = g.ended_at
from groups as g
where p.id = g.first

-- name: former_filters
select id, former_filters, (select log_start from meta) as log_start
from subscription
where former_filters <> '[]'
for update skip locked

-- name: rotate_dedup
select dedup_rotate()

-- name: add_up_aside
select add_up_aside()

-- name: add_up_some
select add_up_aside($1)
