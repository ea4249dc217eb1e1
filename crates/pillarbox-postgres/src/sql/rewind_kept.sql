-- Deliveries whose events are only kept aside: what is read again does not have these. Above $2; of one key, or of all.
update delivery as d
set state = 'pending', attempts = 0, due_at = clock_timestamp(), died_at = null
from event_kept as k
where d.subscription = $1::bigint and d.position > $2::bigint and ($3::text is null or d.key = $3) and d.state <> 'delayed'
    and k.position = d.position
    and not exists (select from event as e where e.position = d.position)
returning k.id
