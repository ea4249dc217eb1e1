-- What is left below a leaf that is about to be emptied is a journal's; the log still begins there.
update meta
set log_start = coalesce((select min(position) from event where position < $1::bigint), $2::bigint),
    pruned_to = greatest(pruned_to, $2 - 1)
