update cursor
set floor = $3::bigint, settled = $4::text::int8multirange, anchor_position = null, anchor_id = null, epoch = epoch + 1,
    revision = revision + 1
where subscription = $1::bigint and lane = $2::integer and epoch = $5::bigint
