-- Deliveries whose events are only kept aside: what is read again does not have these. Above $2; of one key, or of all.
select d.position, d.lane, k.id, d.key
from delivery as d
join event_kept as k on k.position = d.position
where d.subscription = $1::bigint and d.position > $2::bigint and ($3::text is null or d.key = $3) and d.state <> 'delayed'
    -- Not as an anti join, which might read all of the log.
    and (select e.position from event as e where e.position = d.position limit 1) is null
order by d.position
