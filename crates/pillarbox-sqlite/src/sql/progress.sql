-- What floors have passed, and under which epoch. Epoch 0: what a lane was never to deliver.

-- name: insert
insert into pillarbox_progress (subscription, lane, epoch, floor_from, floor_to, started_at, ended_at)
values (?1, ?2, ?3, ?4, ?5, ?6, ?6)

-- name: extend
update pillarbox_progress
set floor_to = ?5, ended_at = ?6
where id = (select max(id) from pillarbox_progress where subscription = ?1 and lane = ?2)
    and epoch = ?3 and floor_to = ?4 and started_at > ?6 - ?7

-- name: settled_by
select epoch, started_at, ended_at
from pillarbox_progress
where subscription = ?1 and lane = ?2 and floor_from < ?3 and floor_to >= ?3 and epoch > 0
order by id desc
limit 1

-- name: covered
select floor_from + 1 as low, floor_to as high from pillarbox_progress where subscription = ?1 and lane = ?2 and epoch > 0

-- name: before_start
select floor_from + 1 as low, floor_to as high from pillarbox_progress where subscription = ?1 and lane = ?2 and epoch = 0

-- name: before_start_within
select id, floor_from, floor_to
from pillarbox_progress
where subscription = ?1
    and lane = ?2
    and epoch = 0
    and floor_from < ?4
    and floor_to >= ?3

-- name: remove
delete from pillarbox_progress where id = ?1

-- name: remove_above
delete from pillarbox_progress where subscription = ?1 and floor_from >= ?2

-- name: cut
update pillarbox_progress set floor_to = ?2 where subscription = ?1 and floor_to > ?2
