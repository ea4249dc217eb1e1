-- breaking: no
-- A relay that sleeps holds the bell's lock alone: whoever cannot share it rings. Nobody asleep, nobody who listens: no ring. The lock is
-- let go at once; whoever looked before a relay fell asleep is found by the lock that it has on the table. The look is a part of a default
-- and so of the prepared plan: the condition of a trigger is read anew for each statement. Relays of an older version are not rung any
-- more and look every poll_interval: replace them soon.

-- Whether publishers look at the bell.
alter table @schema@.meta add column doorbell boolean not null default true;

-- Rings with the commit; the time at which it was called.
create function @schema@.ring_at() returns timestamptz language plpgsql as $$
begin
    perform pg_notify('@channel@', '');
    return clock_timestamp();
end
$$;

-- Lets publishers look at the bell, or not. For the owner.
create function @schema@.set_doorbell(is_on boolean) returns void language plpgsql as $$
begin
    if is_on then
        alter table only @schema@.event alter column created_at set default case
            when pg_try_advisory_lock_shared(@class@, 0) and pg_advisory_unlock_shared(@class@, 0) then clock_timestamp()
            else @schema@.ring_at()
        end;
    else
        alter table only @schema@.event alter column created_at set default clock_timestamp();
    end if;
    update @schema@.meta set doorbell = is_on;
end
$$;

-- Whoever may publish still may: a role that was granted what a plain insert calls gets this too.
do $$
declare
    grantee text;
begin
    for grantee in
        select case g.grantee when 0 then 'public' else format('%I', r.rolname) end
        from pg_proc as p
        cross join lateral aclexplode(p.proacl) as g
        left join pg_roles as r on r.oid = g.grantee
        where p.oid = '@schema@.is_well_formed(text, text, text, json, bytea, text, jsonb)'::regprocedure
            and g.grantee <> p.proowner
    loop
        execute format('grant execute on function @schema@.ring_at() to %s', grantee);
    end loop;
end
$$;

select @schema@.set_doorbell(coalesce(
    (select tgenabled <> 'D' from pg_trigger where tgrelid = '@schema@.event'::regclass and tgname = 'doorbell'), false
));
drop trigger if exists doorbell on @schema@.event;
drop function @schema@.ring();
