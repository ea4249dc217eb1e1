-- Bytes, events kept aside, events. What is many is not counted: of the kept the server's estimate is told; of a large log its positions are, without those that were proven dead.
select
    pg_total_relation_size('event_kept'::regclass)
        + (select coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint from pg_inherits where inhparent = 'event'::regclass),
    (
        select case
            when count(*) < $3 then count(*)
            else greatest(count(*), (select reltuples::bigint from pg_class where oid = 'event_kept'::regclass))
        end
        from (select from event_kept limit $3) as kept
    ),
    case
        when $2::bigint - $1::bigint < $3::bigint then (select count(*) from event)
        else $2 - $1 + 1 - (
            select coalesce(sum(least(high, $2) - greatest(low, $1) + 1), 0)::bigint
            from dead_range
            where high >= $1 and low <= $2
        )
    end
