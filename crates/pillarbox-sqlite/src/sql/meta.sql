-- The values that belong to the whole log.

-- name: get
select value from pillarbox_meta where name = ?1

-- name: set
insert into pillarbox_meta (name, value) values (?1, ?2)
on conflict (name) do update set value = excluded.value

-- name: raise
update pillarbox_meta set value = value + 1 where name = ?1 returning value

-- name: remove
delete from pillarbox_meta where name = ?1

-- name: raise_incarnation
update pillarbox_meta set value = value + 1 where name = 'incarnation'

-- name: snapshot
select
    max(
        coalesce((select seq from sqlite_sequence where name = 'pillarbox_event'), 0),
        coalesce((select max(position) from pillarbox_event), 0)
    ) as horizon,
    (select value from pillarbox_meta where name = 'log_start') as log_start,
    (select value from pillarbox_meta where name = 'incarnation') as incarnation

-- name: signature
select
    max(
        coalesce((select seq from sqlite_sequence where name = 'pillarbox_event'), 0),
        coalesce((select max(position) from pillarbox_event), 0)
    ) as horizon,
    (select value from pillarbox_meta where name = 'revision') as revision,
    (select value from pillarbox_meta where name = 'queue_revision') as queue_revision
