select d.position, d.lane, coalesce(e.id, k.id)
from delivery as d
left join event as e on e.position = d.position
left join event_kept as k on k.position = d.position
where d.subscription = $1::bigint
    and case
        when $2::bigint[] is null then d.state = 'dead' and ($3::text is null or d.key = $3)
        else d.position = any($2)
    end
order by d.position
limit $4::bigint
