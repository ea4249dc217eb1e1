-- Instances: the rows of running relays.

-- name: next
update pillarbox_meta set value = value + 1 where name = 'instance_last' returning value

-- name: enter
insert into pillarbox_instance (id, host, pid, version, started_at, beat_at, subscriptions)
values (?1, ?2, ?3, ?4, ?5, ?5, ?6)

-- name: beat
update pillarbox_instance set beat = beat + 1, beat_at = ?2, report = ?3 where id = ?1

-- name: exists
select 1 from pillarbox_instance where id = ?1

-- name: fleet
select id, beat, subscriptions, report from pillarbox_instance order by id

-- name: instances
select id, host, pid, version, started_at, beat_at, subscriptions, report
from pillarbox_instance
order by id

-- name: bury
delete from pillarbox_instance
where id = ?1 and beat_at < ?2
    and not exists (select 1 from pillarbox_cursor where owner = ?1)
    and not exists (select 1 from pillarbox_delivery where owner = ?1)

-- name: remove
delete from pillarbox_instance where id = ?1
