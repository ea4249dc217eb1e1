-- Claims are recovered from whoever made them as long as he has a row, and at once.
delete from instance as i
where (i.id = any($1::integer[]) or (i.id = any($2::integer[]) and i.beat_at < clock_timestamp() - $3::float8 * interval '1 second'))
    and not exists (select from cursor as c where c.owner = i.id)
    and (select d.position from delivery as d where d.owner = i.id limit 1) is null
