-- breaking: no
-- What retention does to the tables of the log. A relay's role owns none of them, so these functions act for the owner.

-- Serves `requeue` by version and retention, which leaves a journal's leaves alone. Empty where nobody appends.
create index event_stream on @schema@.event (key, stream_version) where stream_version is not null;

-- An empty table that can become a leaf.
create function @schema@.make_leaf(name text) returns text
language plpgsql set search_path = @schema@, pg_catalog, pg_temp as $$
begin
    execute format('create table %I (like event including defaults including constraints including storage '
        'including compression including indexes)', name);
    return name;
end
$$;

-- Lays the leaves from bounds[1] on: each goes to the next bound, the last one is open-ended. What lies there must be empty and
-- is used again with other bounds, as is what retention has emptied. A leaf that bounds[1] falls into ends there from now on,
-- for which its rows are looked at. Publishers wait from the lock to the end of the transaction, so that the caller sets
-- lock_timeout and statement_timeout.
create function @schema@.arrange_leaves(bounds bigint[]) returns void
language plpgsql security definer set search_path = @schema@, pg_catalog, pg_temp as $$
declare
    old record;
    empty boolean;
    spare text[];
    number bigint := (select coalesce(max(substring(name from '[0-9]+$')::bigint), 0) from leaf);
    missing bigint := cardinality(bounds) - (select count(*) from leaf where low >= bounds[1] or emptied);
    covered bigint;
begin
    perform from meta for update;
    -- Before the lock, so that nobody waits for it.
    spare := array(select make_leaf('event_' || number + n) from generate_series(1, missing) as n);

    lock table event in access exclusive mode;
    for old in select name, emptied from leaf where low >= bounds[1] or emptied order by low loop
        execute format('select not exists (select from %I)', old.name) into empty;
        if empty then
            execute format('alter table event detach partition %I', old.name);
            delete from leaf where name = old.name;
            spare := spare || old.name;
        elsif old.emptied then
            -- Somebody drew a position there before retention came and used it afterwards.
            update leaf set emptied = false where name = old.name;
            spare := spare || make_leaf('event_' || number + greatest(missing, 0) + cardinality(spare) + 1);
        else
            raise exception 'leaf % is not empty any more', old.name using errcode = 'object_in_use';
        end if;
    end loop;
    for old in select name, low from leaf where low < bounds[1] and (high is null or high > bounds[1]) loop
        execute format('alter table event detach partition %I', old.name);
        execute format('alter table event attach partition %I for values from (%s) to (%s)', old.name, old.low, bounds[1]);
        update leaf set high = bounds[1] where name = old.name;
    end loop;
    select coalesce(max(high), pg_sequence_last_value('event_position_seq'::regclass) + 1, 1) into covered from leaf;
    if covered <> bounds[1] then
        raise exception 'no leaf would hold the positions from % to %', covered, bounds[1] - 1;
    end if;
    for n in 1 .. cardinality(bounds) loop
        execute format('alter table event attach partition %I for values from (%s) to (%s)',
            spare[n], bounds[n], coalesce(bounds[n + 1]::text, 'maxvalue'));
        insert into leaf (name, low, high) values (spare[n], bounds[n], bounds[n + 1]);
    end loop;
    for n in cardinality(bounds) + 1 .. cardinality(spare) loop
        execute format('drop table %I', spare[n]);
    end loop;
end
$$;

-- Empties a leaf whose events have gone everywhere. Only that leaf is locked, no publisher waits.
create function @schema@.empty_leaf(name text) returns void
language plpgsql security definer set search_path = @schema@, pg_catalog, pg_temp as $$
begin
    -- One that is still to be published into is not to be used elsewhere.
    update leaf
    set emptied = coalesce(high <= pg_sequence_last_value('event_position_seq'::regclass) + 1, false)
    where leaf.name = empty_leaf.name;
    if not found then
        raise exception 'there is no leaf %', name using errcode = 'undefined_table';
    end if;
    execute format('truncate table %I', name);
end
$$;

revoke all on function @schema@.make_leaf(text), @schema@.arrange_leaves(bigint[]), @schema@.empty_leaf(text) from public;
