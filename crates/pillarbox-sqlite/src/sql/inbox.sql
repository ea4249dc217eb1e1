-- The inbox of a receiver.

-- name: accept
insert into pillarbox_inbox (consumer, id) values (?1, ?2) on conflict do nothing

-- name: prune
delete from pillarbox_inbox
where (consumer, id) in (
    select consumer, id from pillarbox_inbox where accepted_at < ?1 order by accepted_at limit ?2
)
