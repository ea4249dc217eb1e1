-- breaking: no
-- Each delivery is looked up by the primary key, also by a plan that was made when there was hardly a row: the subscription is compared in a way
-- that only a look at the index serves. Else all rows of a claim were compared with all of the subscription.

-- Claims rows of a queue that are ready, those that have waited longest for their turn first: at most rows_max, at most one of
-- them suspect (taken from suspect_after or more who did not end it), and that only with `suspects`. Only what is ready since
-- ready_since is looked at. With `again`, what was claimed under these numbers is told, if anything was. What comes without a
-- number stands for its key, which the caller has to promote once this is committed.
--
-- First what was delayed and is due takes its place, at most placed_max; so however many are due together, a call costs what
-- these cost, and the next call goes on. Then rows are chosen and locked by the hint ready_at; whether they are the first of their
-- key is looked at by a later statement, which sees whatever was committed before the lock. Among the rows of a key that are
-- pending, retrying or processing, the one that is processing is always the first: whoever gives a row a place before others locks
-- those others. The planner's choices are fixed, since the table grows faster than its statistics: each row is looked up by itself
-- (`offset 0`), or the planner reads all rows of the subscription where it knows of few.
create or replace function @schema@.claim_deliveries(
    of_subscription bigint, by_owner integer, first_claim bigint, rows_max integer, suspects boolean, suspect_after integer,
    ready_since timestamptz, again boolean, placed_max integer, claimed_max integer
) returns table (
    "position" bigint, topic text, type text, id uuid, key text, payload json, payload_bytes bytea, content_type text,
    headers jsonb, stream_version bigint, deliver_at timestamptz, created_at timestamptz,
    claim bigint, arrival bigint, attempts integer, due_at timestamptz, since timestamptz, crashes integer, ready_at timestamptz
) language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_sort = off
set jit = off as $$
#variable_conflict use_column
declare
    -- So many rows whose hint was wrong are passed over at most; the next call goes on.
    demoted_max constant integer := 1000;
    now_at timestamptz := clock_timestamp();
    dead_blocks boolean;
    -- Fewer where so many took too long; the numbers of all rows_max are the caller's all the same.
    wanted integer := least(rows_max, claimed_max);
    asked integer;
    picked bigint[];
    of_all bigint[];
    picked_count integer;
    suspect bigint[];
    demoted integer := 0;
    passed bigint[] := '{}';
    claimed bigint[];
    told bigint[] := '{}';
begin
    -- A crash of the server takes claims back and ends those who made them: nobody waits for the disk.
    perform set_config('synchronous_commit', 'off', true);
    select s.on_dead = 'block' into dead_blocks
    from @schema@.subscription as s, @schema@.instance as i
    where s.id = of_subscription and i.id = by_owner;
    if not found then
        return;
    end if;
    if again then
        told := array(
            select d.position
            from @schema@.delivery as d
            where d.owner = by_owner and d.subscription = of_subscription and d.claim >= first_claim
                and d.claim < first_claim + rows_max
        );
    end if;
    if told <> '{}' then
        wanted := 0;
    end if;
    if wanted > 0 then
        return query
        select
            null::bigint, null::text, null::text, null::uuid, k.key, null::json, null::bytea, null::text, null::jsonb,
            null::bigint, null::timestamptz, null::timestamptz, null::bigint, null::bigint, null::integer, null::timestamptz,
            null::timestamptz, null::integer, null::timestamptz
        from unnest(@schema@.place_delayed(of_subscription, now_at, placed_max)) as k (key);
        now_at := clock_timestamp();
    end if;
    while wanted > 0 and demoted < demoted_max loop
        asked := wanted;
        select array_agg(c.position), count(*), array_agg(c.position) filter (where c.crashes >= suspect_after)
        into picked, picked_count, suspect
        from (
            select d.position, d.crashes
            from @schema@.delivery as d
            where d.subscription = of_subscription and d.ready_at >= ready_since and d.ready_at <= now_at
                and d.owner is null and d.state in ('pending', 'retrying')
                and (d.crashes < suspect_after or suspects) and d.position <> all (passed)
            order by d.ready_at
            limit asked
            for update skip locked
        ) as c;
        exit when picked_count = 0;
        if suspect is not null then
            passed := passed || suspect[2:];
            suspects := false;
            picked := array(
                select p.position from unnest(picked) with ordinality as p (position, number)
                where p.position <> all (passed)
                order by p.number
            );
        end if;
        of_all := array_fill(of_subscription, array[cardinality(picked)]);
        with heads as materialized (
            select w.subscription, w.position, row_number() over (order by w.number) as number
            from unnest(of_all, picked) with ordinality as w (subscription, position, number)
            cross join lateral (
                select r.position, r.key, r.state, r.due_at, r.arrival
                from @schema@.delivery as r
                where r.subscription = w.subscription and r.position = w.position
                offset 0
            ) as d
            where d.due_at <= now_at and d.state in ('pending', 'retrying')
                and (
                    d.key is null
                    or d.position = (
                        select h.position
                        from @schema@.delivery as h
                        where h.subscription = of_subscription and h.key = d.key
                            and h.state in ('pending', 'retrying', 'processing')
                        order by h.arrival
                        limit 1
                    ) and (
                        not dead_blocks
                        or (
                            select b.position
                            from @schema@.delivery as b
                            where b.subscription = of_subscription and b.key = d.key and b.state = 'dead'
                                and b.arrival < d.arrival
                            order by b.arrival
                            limit 1
                        ) is null
                    )
                )
        ), claimed as (
            update @schema@.delivery as d
            set state = 'processing', owner = by_owner, claim = first_claim + h.number - 1, claimed_at = now_at
            from heads as h
            where d.subscription = any (array[h.subscription]) and d.position = h.position
            returning d.position
        )
        select coalesce(array_agg(c.position), '{}') into claimed from claimed as c;
        if cardinality(claimed) < cardinality(picked) then
            picked := array(select unnest(picked) except select unnest(claimed));
            of_all := array_fill(of_subscription, array[cardinality(picked)]);
            demoted := demoted + cardinality(picked);
            return query
            update @schema@.delivery as d
            set ready_at = case when d.key is null and d.state in ('pending', 'retrying') then greatest(d.due_at, now_at) end
            from unnest(of_all, picked) as w (subscription, position)
            where d.subscription = any (array[w.subscription]) and d.position = w.position
            returning
                d.position, null::text, null::text, null::uuid, d.key, null::json, null::bytea, null::text, null::jsonb,
                null::bigint, null::timestamptz, null::timestamptz, null::bigint, d.arrival, d.attempts, d.due_at, d.since,
                d.crashes, d.ready_at;
        end if;
        told := told || claimed;
        wanted := wanted - cardinality(claimed);
        first_claim := first_claim + cardinality(claimed);
        exit when picked_count < asked;
    end loop;
    return query
    select
        d.position, coalesce(e.topic, k.topic), coalesce(e.type, k.type), coalesce(e.id, k.id, @schema@.event_id(e.position, e.created_at)), coalesce(e.key, k.key, d.key),
        coalesce(e.payload, k.payload), coalesce(e.payload_bytes, k.payload_bytes), coalesce(e.content_type, k.content_type),
        coalesce(e.headers, k.headers), coalesce(e.stream_version, k.stream_version), coalesce(e.deliver_at, k.deliver_at),
        coalesce(e.created_at, k.created_at), d.claim, d.arrival, d.attempts, d.due_at, d.since, d.crashes, d.ready_at
    from unnest(array_fill(of_subscription, array[cardinality(told)]), told) as w (subscription, position)
    cross join lateral (
        select * from @schema@.delivery as r where r.subscription = w.subscription and r.position = w.position offset 0
    ) as d
    left join @schema@.event as e on e.position = d.position
    left join @schema@.event_kept as k on k.position = d.position and e.position is null
    order by d.claim;
end
$$;

-- Lets what was delayed and is due take its place behind what its key has, in order, at most rows_max. The keys of which a row is
-- not known to be the first: whoever ends or adds rows of such a key at this moment sees nothing of it, so that the caller has
-- to promote them once this is committed. Acts with its caller's rights.
--
-- Whoever places rows of a lane holds its cursor until the commit, and chooses the rows after that: of two who place rows of one key the
-- later one sees what the other has placed. While somebody adds to a lane, nobody knows what its keys have: its rows wait, and
-- those of other lanes do not wait for it.
create or replace function @schema@.place_delayed(of_subscription bigint, until timestamptz, rows_max integer) returns text[] language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_sort = off
set jit = off as $$
declare
    due bigint[];
    due_lanes integer[];
    free_lanes integer[];
    other_lane integer;
    of_all bigint[];
    placed_keys text[];
begin
    due_lanes := array(
        select distinct f.lane
        from (
            select d.lane
            from @schema@.delivery as d
            where d.subscription = of_subscription and d.state = 'delayed' and d.due_at <= until and d.queued
            order by d.due_at, d.position
            limit rows_max
        ) as f
    );
    if due_lanes = '{}' then
        return '{}';
    end if;
    free_lanes := array(
        select c.lane
        from @schema@.cursor as c
        where c.subscription = of_subscription and c.lane = any (due_lanes)
        for no key update skip locked
    );
    if free_lanes <> '{}' then
        -- No more rows than these are looked at, whatever lies behind those of lanes that are not free.
        due := array(
            select f.position
            from (
                select d.position, d.lane
                from @schema@.delivery as d
                where d.subscription = of_subscription and d.state = 'delayed' and d.due_at <= until and d.queued
                order by d.due_at, d.position
                limit rows_max
            ) as f
            where f.lane = any (free_lanes)
        );
    else
        -- Another lane, with a look at the index for each. Bounds and order are written so that no other index serves them.
        select c.lane into other_lane
        from @schema@.cursor as c
        where c.subscription = of_subscription and c.lane <> all (due_lanes)
            and (
                select d.position
                from @schema@.delivery as d
                where d.subscription = of_subscription and d.state = 'delayed' and d.queued
                    and d.lane >= c.lane and (d.lane, d.due_at) <= (c.lane, until)
                order by d.lane, d.due_at, d.position
                limit 1
            ) is not null
        limit 1
        for no key update of c skip locked;
        if not found then
            return '{}';
        end if;
        due := array(
            select d.position
            from @schema@.delivery as d
            where d.subscription = of_subscription and d.state = 'delayed' and d.queued
                and d.lane >= other_lane and (d.lane, d.due_at) <= (other_lane, until)
            order by d.lane, d.due_at, d.position
            limit rows_max
        );
    end if;
    of_all := array_fill(of_subscription, array[cardinality(due)]);
    due := array(
        select w.position
        from unnest(of_all, due) as w (subscription, position)
        cross join lateral (
            select r.state
            from @schema@.delivery as r
            where r.subscription = w.subscription and r.position = w.position
            offset 0
            for update skip locked
        ) as locked
        where locked.state = 'delayed'
    );
    if due = '{}' then
        return '{}';
    end if;
    of_all := array_fill(of_subscription, array[cardinality(due)]);
    with placed as (
        update @schema@.delivery as d
        set state = 'pending', arrival = nextval('@schema@.delivery_arrival_seq'),
            ready_at = case when d.key is null then clock_timestamp() end
        from unnest(of_all, due) as w (subscription, position)
        where d.subscription = any (array[w.subscription]) and d.position = w.position
        returning d.key
    )
    select array_agg(distinct p.key) filter (where p.key is not null) into placed_keys from placed as p;
    if placed_keys is null then
        return '{}';
    end if;
    perform @schema@.promote(array_fill(of_subscription, array[cardinality(placed_keys)]), placed_keys);
    return array(
        select distinct d.key
        from unnest(of_all, due) as w (subscription, position)
        cross join lateral (
            select r.key, r.ready_at
            from @schema@.delivery as r
            where r.subscription = w.subscription and r.position = w.position
            offset 0
        ) as d
        where d.key is not null and d.ready_at is null
    );
end
$$;

-- Says of the first row of each of these keys that it is the first, unless that is known or somebody works on it; of how many.
-- Whoever ends rows and whoever adds rows behind others calls this after the commit: of two that do it at once, the later one sees
-- what the other did. Whoever has locked such a row calls this too.
create or replace function @schema@.promote(subscriptions bigint[], keys text[]) returns bigint language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_sort = off
set jit = off as $$
declare
    promoted bigint;
begin
    -- A hint; what is lost of it is found by claims.
    perform set_config('synchronous_commit', 'off', true);
    -- One look at the index for each key. Not inlined: the planner would join every row with every key. And where a row is looked up by
    -- itself nothing else is said of it: the planner would take another index than the primary key's.
    with heads as materialized (
        select k.subscription, h.position
        from unnest(subscriptions, keys) as k (subscription, key)
        join @schema@.subscription as s on s.id = k.subscription
        cross join lateral (
            select d.position, d.arrival, d.state, d.owner, d.ready_at
            from @schema@.delivery as d
            where d.subscription = k.subscription and d.key = k.key and d.state in ('pending', 'retrying', 'processing')
            order by d.arrival
            limit 1
        ) as h
        where h.ready_at is null and h.owner is null and h.state in ('pending', 'retrying')
            and (
                s.on_dead <> 'block'
                or (
                    select b.position
                    from @schema@.delivery as b
                    where b.subscription = k.subscription and b.key = k.key and b.state = 'dead' and b.arrival < h.arrival
                    order by b.arrival
                    limit 1
                ) is null
            )
    ), free as materialized (
        select h.subscription, h.position
        from heads as h
        cross join lateral (
            select d.ready_at, d.owner, d.state
            from @schema@.delivery as d
            where d.subscription = any (array[h.subscription]) and d.position = h.position
            offset 0
            for update skip locked
        ) as locked
        where locked.ready_at is null and locked.owner is null and locked.state in ('pending', 'retrying')
    )
    update @schema@.delivery as d
    set ready_at = greatest(d.due_at, clock_timestamp())
    from free as f
    where d.subscription = any (array[f.subscription]) and d.position = f.position;
    get diagnostics promoted = row_count;
    return promoted;
end
$$;
