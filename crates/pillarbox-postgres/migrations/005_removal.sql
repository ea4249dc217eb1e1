-- breaking: no
-- What may be removed is verified where it is removed, whoever asks.

-- Empties a leaf whose events have gone everywhere. Only that leaf is locked, no publisher waits. What nobody may remove is refused as
-- object_not_in_prerequisite_state: what a lane has not passed, what a delivery needs and has no copy of, a journal's events, and what
-- is younger than the log's retention_keep_ms. The setting pillarbox.removes, for the transaction, widens that: 'unreceived' lets
-- a log without subscriptions be emptied, whose events nobody has received; 'everything', for `reset`, also takes journals and
-- young events. Anybody can write a setting, so that only the owner of the log and the members of that role may use these two.
create or replace function @schema@.empty_leaf(name text) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    removes constant text := coalesce(nullif(current_setting('pillarbox.removes', true), ''), 'received');
    keep_ms bigint;
    first bigint;
    last bigint;
    newest timestamptz;
    journal boolean;
    floor bigint;
    missing bigint;
begin
    -- Inside this function the current user is the owner, the session's is who called it.
    if removes <> 'received' and not pg_has_role(session_user, current_user, 'member') then
        raise exception 'must be owner of schema @schema@ (%, or a member of it) to remove events that nobody has received', current_user
            using errcode = 'insufficient_privilege';
    end if;
    -- Whoever rewinds or subscribes waits, or has lowered the floor that is read below.
    select m.retention_keep_ms into keep_ms from @schema@.meta as m for update;
    -- One that is still to be published into is not to be used elsewhere.
    update @schema@.leaf
    set emptied = coalesce(high <= pg_sequence_last_value('@schema@.event_position_seq'::regclass) + 1, false)
    where leaf.name = empty_leaf.name;
    if not found then
        raise exception 'there is no leaf %', name using errcode = 'undefined_table';
    end if;
    -- Nothing appears in it from here on.
    execute format('lock table only @schema@.%I in access exclusive mode', name);
    execute format('select min(position), max(position) from @schema@.%I', name) into first, last;
    if last is null then
        return;
    end if;
    execute format('select created_at from @schema@.%I where position = $1', name) into newest using last;
    select min(c.floor) into floor from @schema@.cursor as c;
    if floor is null and removes = 'received' then
        raise exception 'leaf % has events that nobody has received, since the log has no subscription', name
            using errcode = 'object_not_in_prerequisite_state';
    elsif floor < last then
        raise exception 'leaf % has events up to %, and a subscription has passed only those up to %', name, last, floor
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    -- Subscription by subscription, by the index of the primary key.
    execute format(
        'select count(*)
         from @schema@.subscription as s
         cross join lateral (
             select position from @schema@.delivery where subscription = s.id and position >= $1 and position <= $2
         ) as d
         where exists (select from @schema@.%I as e where e.position = d.position)
             and not exists (select from @schema@.event_kept as k where k.position = d.position)', name
    ) into missing using first, last;
    if missing > 0 then
        raise exception 'leaf % has events that deliveries still need: %', name, missing
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    if removes <> 'everything' then
        -- 9223372036854775807 is for ever.
        if newest > clock_timestamp() - least(keep_ms, 3155760000000) * interval '1 millisecond' then
            raise exception 'leaf % has events that are younger than the log is to keep them', name
                using errcode = 'object_not_in_prerequisite_state';
        end if;
        execute format('select exists (select from @schema@.%I where stream_version is not null)', name) into journal;
        if journal then
            raise exception 'leaf % has events of a journal', name using errcode = 'object_not_in_prerequisite_state';
        end if;
    end if;
    execute format('truncate table @schema@.%I', name);
end
$$;
