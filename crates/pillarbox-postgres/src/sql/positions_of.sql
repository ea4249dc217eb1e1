-- An id that a publisher brought is found by the index, whose predicate is repeated for that; any other says its position.
select position
from event
where id = $1::uuid
    and is_well_formed(topic, type, key, payload, payload_bytes, content_type, headers, created_at)
union
select position
from event
where position = (($2::bigint - (select id_salt from meta)) & 4611686018427387903) and id is null
    and event_id(position, created_at) = $1
union
select position from event_kept where id = $1
order by position
