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
