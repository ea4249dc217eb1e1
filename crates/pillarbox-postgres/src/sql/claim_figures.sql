-- How many rows could be claimed; when the next is due; and whether instance $1 has a row.
select
    (
        select count(*)
        from (
            select
            from delivery as d
            where d.subscription = r.subscription and d.ready_at >= r.since and d.ready_at <= statement_timestamp()
                and d.owner is null
            limit r.counted
        ) as waiting
    ),
    (
        select d.ready_at
        from delivery as d
        where d.subscription = r.subscription and d.ready_at > statement_timestamp() and d.owner is null
        order by d.ready_at
        limit 1
    ),
    statement_timestamp(),
    exists (select from instance as i where i.id = $1::integer)
from unnest($2::bigint[], $3::timestamptz[], $4::bigint[]) with ordinality as r (subscription, since, counted, ordinal)
order by r.ordinal
