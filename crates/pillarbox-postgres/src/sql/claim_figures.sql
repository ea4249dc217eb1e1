-- How many rows could be claimed, those included that were delayed and are due; when the next is due; and whether instance $1 has a
-- row.
select
    (
        select count(*)
        from (
            select
            from delivery as d
            where d.subscription = r.subscription and d.ready_at >= r.since and d.ready_at <= statement_timestamp()
                and d.owner is null
            order by d.ready_at
            limit r.counted
        ) as waiting
    ) + (
        select count(*)
        from (
            select
            from delivery as d
            where d.subscription = r.subscription and d.state = 'delayed' and d.due_at <= statement_timestamp()
            order by d.due_at
            limit r.counted
        ) as due
    ),
    least(
        (
            select d.ready_at
            from delivery as d
            where d.subscription = r.subscription and d.ready_at > statement_timestamp() and d.owner is null
            order by d.ready_at
            limit 1
        ),
        (
            select d.due_at
            from delivery as d
            where d.subscription = r.subscription and d.state = 'delayed' and d.due_at > statement_timestamp()
            order by d.due_at
            limit 1
        )
    ),
    statement_timestamp(),
    exists (select from instance as i where i.id = $1::integer)
-- Joined, so that the plan is the same whatever is asked for.
from unnest(array[$2::bigint], array[$3::timestamptz], array[$4::bigint]) as r (subscription, since, counted)
