-- What retention looks for and removes.

-- name: candidates
select position, created_at from pillarbox_event where position > ?1 order by position limit ?2

-- name: furthest_behind
select s.name, min(c.floor) as floor
from pillarbox_cursor as c
join pillarbox_subscription as s on s.id = c.subscription
group by s.id
order by 2
limit 1

-- name: count_events
select count(*) from pillarbox_event where position > ?1 and position <= ?2 and stream_version is null

-- name: keep
-- Copies what deliveries still need of the events that are about to go.
insert or ignore into pillarbox_event_kept (
    position, id, topic, key, type, payload, content_type, headers, stream_version, deliver_at, created_at
)
select position, id, topic, key, type, payload, content_type, headers, stream_version, deliver_at, created_at
from pillarbox_event
where stream_version is null
    and position in (select position from pillarbox_delivery where position > ?1 and position <= ?2)

-- name: prune_events
delete from pillarbox_event
where position > ?1 and position <= ?2 and stream_version is null

-- name: log_start
-- A journal's events stay; the log then still begins with the first of them.
select coalesce(min(position), ?1 + 1) from pillarbox_event where position <= ?1

-- name: kept_looked_at
select value from pillarbox_meta where name = 'kept_looked_at'

-- name: kept_next
-- The next ?2 copies above ?1: how many there are, and the last of them.
select count(*) as looked_at, max(position) as last
from (select position from pillarbox_event_kept where position > ?1 order by position limit ?2)

-- name: prune_kept
-- Removes those of the copies above ?1 and up to ?2 that no delivery needs.
delete from pillarbox_event_kept
where position > ?1 and position <= ?2
    and not exists (select 1 from pillarbox_delivery as d where d.position = pillarbox_event_kept.position)

-- name: count_dead
select count(*) from pillarbox_delivery where died_at < ?1

-- name: dead
select subscription, position, lane, key
from pillarbox_delivery
where died_at < ?1
order by died_at
limit ?2

-- name: prune_dead_ranges
delete from pillarbox_dead_range where high < ?1

-- name: prune_dedup
delete from pillarbox_dedup
where (topic, key, dedup_key) in (
    select topic, key, dedup_key from pillarbox_dedup where created_at < ?1 order by created_at limit ?2
)

-- name: prune_progress
delete from pillarbox_progress
where floor_to < ?1 - 1
    and id < (
        select max(id)
        from pillarbox_progress as newest
        where newest.subscription = pillarbox_progress.subscription and newest.lane = pillarbox_progress.lane
    )

-- name: progress_groups
select
    min(id) as first, min(floor_from) as merged_from, max(floor_to) as merged_to, max(ended_at) as merged_end,
    group_concat(id) as ids
from pillarbox_progress
where ended_at < ?1 and epoch > 0
group by subscription, lane, epoch, started_at / ?2
having count(*) > 1 and sum(floor_to - floor_from) = max(floor_to) - min(floor_from)
limit ?3

-- name: merge_progress
update pillarbox_progress set floor_from = ?2, floor_to = ?3, ended_at = ?4 where id = ?1

-- name: remove_merged
delete from pillarbox_progress where id <> ?1 and id in (select value from json_each('[' || ?2 || ']'))
