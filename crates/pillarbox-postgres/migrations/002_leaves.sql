-- breaking: no
-- What retention does to the tables of the log. A relay's role owns none of them, so these functions act for the owner: every
-- name says its schema, and no caller's temporary table or view can stand in for one.

-- Serves `requeue` by version and retention, which leaves a journal's leaves alone. Empty where nobody appends.
create index event_stream on @schema@.event (key, stream_version) where stream_version is not null;

-- An empty table that can become a leaf.
create function @schema@.make_leaf(name text) returns text
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    execute format('create table @schema@.%I (like @schema@.event including defaults including constraints including storage '
        'including compression including indexes)', name);
    return name;
end
$$;

-- Lays the leaves from bounds[1] on: each goes to the next bound, the last one is open-ended. What lies there must be empty and
-- is used again with other bounds, as is what retention has emptied. A leaf that bounds[1] falls into ends there from now on,
-- for which its rows are looked at. Publishers wait from the lock to the end of the transaction, so that the caller sets
-- lock_timeout and statement_timeout. What has changed since the bounds were chosen is refused as object_in_use.
create function @schema@.arrange_leaves(bounds bigint[]) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    old record;
    empty boolean;
    spare text[];
    number bigint;
    missing bigint;
    covered bigint;
begin
    perform from @schema@.meta for update;
    -- Only now: somebody else may have laid leaves while we waited.
    select coalesce(max(substring(name from '[0-9]+$')::bigint), 0) into number from @schema@.leaf;
    select cardinality(bounds) - count(*) into missing from @schema@.leaf where low >= bounds[1] or emptied;
    -- Before the lock, so that nobody waits for it.
    spare := array(select @schema@.make_leaf('event_' || number + n) from generate_series(1, missing) as n);

    lock table @schema@.event in access exclusive mode;
    for old in select name, emptied from @schema@.leaf where low >= bounds[1] or emptied order by low loop
        execute format('select not exists (select from @schema@.%I)', old.name) into empty;
        if empty then
            execute format('alter table @schema@.event detach partition @schema@.%I', old.name);
            delete from @schema@.leaf where name = old.name;
            spare := spare || old.name;
        elsif old.emptied then
            -- Somebody drew a position there before retention came and used it afterwards.
            update @schema@.leaf set emptied = false where name = old.name;
            spare := spare || @schema@.make_leaf('event_' || number + greatest(missing, 0) + cardinality(spare) + 1);
        else
            raise exception 'leaf % is not empty any more', old.name using errcode = 'object_in_use';
        end if;
    end loop;
    for old in select name, low from @schema@.leaf where low < bounds[1] and (high is null or high > bounds[1]) loop
        execute format('alter table @schema@.event detach partition @schema@.%I', old.name);
        execute format('alter table @schema@.event attach partition @schema@.%I for values from (%s) to (%s)',
            old.name, old.low, bounds[1]);
        update @schema@.leaf set high = bounds[1] where name = old.name;
    end loop;
    -- What was handed out and has no leaf any more is gone and needs none.
    select greatest(max(high), pg_sequence_last_value('@schema@.event_position_seq'::regclass) + 1, 1)
    into covered
    from @schema@.leaf;
    if covered < bounds[1] then
        raise exception 'no leaf would hold the positions from % to %', covered, bounds[1] - 1
            using errcode = 'object_in_use';
    end if;
    for n in 1 .. cardinality(bounds) loop
        execute format('alter table @schema@.event attach partition @schema@.%I for values from (%s) to (%s)',
            spare[n], bounds[n], coalesce(bounds[n + 1]::text, 'maxvalue'));
        insert into @schema@.leaf (name, low, high) values (spare[n], bounds[n], bounds[n + 1]);
    end loop;
    for n in cardinality(bounds) + 1 .. cardinality(spare) loop
        execute format('drop table @schema@.%I', spare[n]);
    end loop;
end
$$;

-- Empties a leaf whose events have gone everywhere. Only that leaf is locked, no publisher waits.
create function @schema@.empty_leaf(name text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    -- One that is still to be published into is not to be used elsewhere.
    update @schema@.leaf
    set emptied = coalesce(high <= pg_sequence_last_value('@schema@.event_position_seq'::regclass) + 1, false)
    where leaf.name = empty_leaf.name;
    if not found then
        raise exception 'there is no leaf %', name using errcode = 'undefined_table';
    end if;
    execute format('truncate table @schema@.%I', name);
end
$$;

revoke all on function @schema@.make_leaf(text), @schema@.arrange_leaves(bigint[]), @schema@.empty_leaf(text) from public;
