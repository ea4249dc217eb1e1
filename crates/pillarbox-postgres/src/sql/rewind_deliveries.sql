delete from delivery as d
where d.subscription = $1::bigint and d.position > $2::bigint and not d.position <@ $3::text::int8multirange
    -- Not as a semi join, which might read all of the log.
    and (select e.position from event as e where e.position = d.position limit 1) is not null
returning case when d.queued then d.key end
