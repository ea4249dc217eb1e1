delete from delivery as d
where d.subscription = $1::bigint and d.position > $2::bigint and not d.position <@ $3::text::int8multirange
    and exists (select from event as e where e.position = d.position)
returning case when d.queued then d.key end
