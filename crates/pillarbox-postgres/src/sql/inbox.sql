-- The inbox of a receiver.

-- name: accept
select @schema@.accept($1, $2)

-- name: accept_text
select @schema@.accept($1::text, $2::text::uuid)

-- name: prune
delete from inbox
where ctid = any (array(
    select ctid
    from inbox
    where accepted_at < clock_timestamp() - $1 * interval '1 millisecond'
    order by accepted_at
    limit $2
))

-- name: keep
-- For how long what was accepted is kept, at least.
select retention_inbox_ms from meta
