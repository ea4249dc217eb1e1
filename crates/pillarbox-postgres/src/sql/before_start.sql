select exists (
    select
    from progress
    where subscription = $1::bigint and lane = $2::integer and floor_from < $3::bigint and floor_to >= $3 and epoch = 0
)
