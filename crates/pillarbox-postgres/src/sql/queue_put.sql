-- Rows of queues for events that have none yet, in order; the keys of which one is behind others. A key's first row here is ready
-- at once if the key has no other. A row that is worked on already comes before whatever its key has: an operator may have added rows
-- meanwhile. A relay's clock may be ahead of the server's. What the stored cursor has settled had its row before: the owner repeats a
-- settlement that was not answered, and by then its rows may be done.
with added as (
    insert into delivery (
        subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, errors, queued, owner, claim,
        claimed_at, ready_at
    )
    select
        w.subscription, w.position, w.lane,
        coalesce(
            case
                when w.claim is not null and w.key is not null then (
                    select d.arrival
                    from delivery as d
                    where d.subscription = w.subscription and d.key = w.key and d.state in ('pending', 'retrying', 'processing')
                    order by d.arrival
                    limit 1
                ) - cardinality($3) - 1 + w.ordinal
            end,
            nextval('delivery_arrival_seq')
        ),
        w.key, w.state, w.attempts, case w.state when 'pending' then least(w.due_at, clock_timestamp()) else w.due_at end, w.since,
        case w.state when 'dead' then clock_timestamp() end, w.errors, true, case when w.claim is not null then $1::integer end,
        w.claim, case when w.claim is not null then clock_timestamp() end,
        case
            -- What is delayed is found by when it is due.
            when w.claim is not null or w.state in ('dead', 'delayed') then null
            when w.key is null then case w.state when 'pending' then clock_timestamp() else greatest(w.due_at, clock_timestamp()) end
            -- Not as an anti join, which might read all of the table. What is dead may block its key; a promotion looks.
            when w.is_first and (
                select d.position
                from delivery as d
                where d.subscription = w.subscription and d.key = w.key and d.state in ('pending', 'retrying', 'processing')
                order by d.arrival
                limit 1
            ) is null and (
                select d.position
                from delivery as d
                where d.subscription = w.subscription and d.key = w.key and d.state = 'dead'
                order by d.arrival
                limit 1
            ) is null then case w.state when 'pending' then clock_timestamp() else greatest(w.due_at, clock_timestamp()) end
        end
    from (
        select
            n.*,
            row_number() over (partition by n.subscription, n.key, n.state = 'delayed' order by n.ordinal) = 1
                and n.key is not null and n.state <> 'delayed' as is_first
        from unnest($2::bigint[], $3::bigint[], $4::integer[], $5::text[], $6::text[], $7::integer[], $8::timestamptz[],
            $9::timestamptz[], $10::text[], $11::bigint[], $12::bigint[])
            with ordinality
            as n (subscription, position, lane, key, state, attempts, due_at, since, errors, claim, epoch, ordinal)
        join cursor as c on c.subscription = n.subscription and c.lane = n.lane and c.epoch = n.epoch
        where n.position > c.floor and not c.settled @> n.position
        order by n.ordinal
    ) as w
    on conflict (subscription, position) do nothing
    returning subscription, key, state, claim, ready_at
)
select distinct subscription, key
from added
where ready_at is null and claim is null and key is not null and state in ('pending', 'retrying')
