select position, topic, type, key, deliver_at, created_at, coalesce(id, event_id(position, created_at))
from event
where position > $1::bigint
    and ($2::text is null or key = $2)
    and ($3::text is null or topic = $3)
    and ($4::text is null or starts_with(topic, $4))
    and ($5::text is null or headers ->> 'correlationid' = $5)
order by position
limit $6::bigint
