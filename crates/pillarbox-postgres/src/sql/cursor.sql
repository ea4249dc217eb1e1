-- Cursors: what each lane has settled, who owns it, and under which epoch and revision.

-- name: fleet
select subscription, lane, owner, epoch, revision, takeovers from cursor order by subscription, lane

-- name: lanes
select floor, settled::text as settled, anchor_position, anchor_id, subscription, lane, owner, epoch, revision
from cursor
order by subscription, lane

-- name: take_end
-- Ends the sessions of owners whose beat has stood still, as far as this role may: one that is frozen or cut off may hold the locks of
-- what is to be taken. Whoever has beaten since lives and is left alone. $5 are what the names of an instance's sessions end with.
with silent as (
    select distinct i.id
    from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[]) as w (subscription, lane, expected, beat)
    join cursor as c on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.expected
    join instance as i on i.id = c.owner and i.beat = w.beat
)
select count(pg_terminate_backend(a.pid))
from pg_stat_activity as a
join silent as s on true
join unnest($5::text[]) as n (ending) on a.application_name = 'pillarbox relay ' || s.id || n.ending
where a.datname = current_database()
    and a.pid <> pg_backend_pid()
    and case
        when (select rolsuper from pg_roles where oid = a.usesysid)
            then (select rolsuper from pg_roles where rolname = current_user)
        else pg_has_role(a.usesysid, 'usage') or pg_has_role('pg_signal_backend', 'usage')
    end

-- name: take
-- In lane order, so that nobody waits in a circle. The instance's row stays while its lanes are taken, and an owner that was
-- seen to stand still at a beat cannot beat meanwhile: one that has beaten since lives.
with me as (
    select id from instance where id = $1 for key share
), wanted as (
    select * from unnest($2::bigint[], $3::integer[], $4::bigint[], $5::bigint[]) with ordinality
        as w (subscription, lane, expected, beat, ordinal)
), owners as (
    select i.id, i.beat
    from instance as i
    where i.id in (
        select c.owner
        from cursor as c
        join wanted as w on w.subscription = c.subscription and w.lane = c.lane
        where w.beat is not null
    )
    order by i.id
    for share
), locked as (
    select c.subscription, c.lane, c.epoch, c.owner, w.ordinal
    from cursor as c
    join wanted as w on w.subscription = c.subscription and w.lane = c.lane
    where c.epoch = w.expected
        and exists (select from me)
        and not exists (select from owners as o where o.id = c.owner and o.beat <> w.beat)
    order by c.subscription, c.lane
    for update of c
)
update cursor as c
set owner = $1, epoch = c.epoch + 1,
    takeovers = c.takeovers + case when l.owner is not null and l.owner <> $1 then 1 else 0 end
from locked as l
where c.subscription = l.subscription and c.lane = l.lane and c.epoch = l.epoch
returning l.ordinal, c.epoch, l.owner

-- name: load
select
    w.ordinal, c.floor, c.settled::text as settled, c.anchor_position, c.anchor_id, c.takeovers, c.revision,
    (select coalesce(e.id, event_id(e.position, e.created_at)) from event as e where e.position = c.anchor_position)
        as found_id,
    (select max(d.arrival) from delivery as d where d.subscription = c.subscription and d.lane = c.lane and not d.queued)
        as last_arrival
from unnest($1::bigint[], $2::integer[], $3::bigint[]) with ordinality as w (subscription, lane, epoch, ordinal)
join cursor as c on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch

-- name: lock
-- The fence: a lane whose epoch has moved on is not among the answers, and the others cannot move before the commit. Everything that
-- the same settlement writes looks at the epoch again; it is sent before this is answered.
select c.subscription, c.lane, c.revision
from cursor as c
join unnest($1::bigint[], $2::integer[], $3::bigint[]) as w (subscription, lane, epoch)
    on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch
order by c.subscription, c.lane
for update of c

-- name: check_horizon
-- Fails, and the settlement with it, if a position above the horizon was read; nobody is there to decide it between two statements.
select 1 / (coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) >= $1::bigint)::integer

-- name: settle
update cursor as c
set floor = w.floor, settled = w.settled::int8multirange, anchor_position = w.anchor_position, anchor_id = w.anchor_id,
    takeovers = case when w.calm then 0 else c.takeovers end,
    owner = case when w.release then null else c.owner end
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::uuid[], $8::boolean[],
    $9::boolean[]) as w (subscription, lane, epoch, floor, settled, anchor_position, anchor_id, release, calm)
where c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch

-- name: add_lanes
insert into cursor (subscription, lane, floor, settled)
select n.subscription, n.lane, n.floor, n.settled::int8multirange
from unnest($1::bigint[], $2::integer[], $3::bigint[], $4::text[]) as n (subscription, lane, floor, settled)

-- name: replace
insert into cursor (subscription, lane, floor, epoch, revision) select $1, lane, $3, $4, $5
from generate_series(0, $2::integer - 1) as lane

-- name: highest_floor
select coalesce(max(floor), 0) from cursor

-- name: lock_all
-- In the order in which everybody locks cursors, as all statements here that lock several.
select from cursor order by subscription, lane for update

-- name: lock_of
select from cursor where subscription = $1 order by lane for update

-- name: lock_lanes
select from cursor where subscription = $1 and lane = any($2) order by lane for update

-- name: lock_of_name
select from cursor where subscription in (select id from subscription where name = $1) order by lane for update

-- name: touch
-- The owners load the deliveries of these lanes again.
update cursor set revision = revision + 1 where subscription = $1 and lane = any($2)

-- name: fence
update cursor set epoch = epoch + 1 where subscription = $1 and lane = $2 and epoch = $3

-- name: raise_epoch
-- The owner cannot settle any more and loads the lane again.
update cursor set epoch = epoch + 1 where subscription = $1 and lane = $2

-- name: fence_changed
-- The filters of these subscriptions change: whoever read their lanes with the old ones cannot settle any more. In the order in
-- which everybody locks cursors; the floors are those of the rows as they are locked.
with locked as (
    select subscription, lane from cursor where subscription = any ($1::bigint[]) order by subscription, lane for update
)
update cursor as c
set epoch = c.epoch + 1
from locked as l
where c.subscription = l.subscription and c.lane = l.lane
returning c.subscription, c.lane, c.floor, c.settled::text as settled

-- name: rewind
update cursor
set floor = $3::bigint, settled = $4::text::int8multirange, anchor_position = null, anchor_id = null, epoch = epoch + 1,
    revision = revision + 1
where subscription = $1::bigint and lane = $2::integer and epoch = $5::bigint

-- name: jump
update cursor
set floor = $3, settled = $4::text::int8multirange, epoch = epoch + 1
where subscription = $1
    and lane = $2

-- name: give_back
update cursor set owner = null where owner = $1
