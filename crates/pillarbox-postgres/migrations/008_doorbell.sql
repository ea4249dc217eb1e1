-- breaking: no
-- A relay that sleeps holds the bell's lock alone: whoever cannot share it rings. Nobody asleep, nobody who listens: no ring. The lock is
-- let go at once; whoever looked before a relay fell asleep is found by the lock that it has on the table. The look is a part of a default
-- and so of the prepared plan: the condition of a trigger is read anew for each statement. Relays of an older version are not rung any
-- more and look every poll_interval: replace them soon.

-- Whether publishers look at the bell.
alter table @schema@.meta add column doorbell boolean not null default true;

-- Lets publishers look at the bell, or not. For the owner.
create function @schema@.set_doorbell(is_on boolean) returns void language plpgsql as $$
begin
    if is_on then
        alter table only @schema@.event alter column created_at set default case
            when pg_try_advisory_lock_shared(@class@, 0) and pg_advisory_unlock_shared(@class@, 0) then clock_timestamp()
            -- A relay that stands still asleep takes no rings in: they must not fill the queue of the whole server.
            when pg_notification_queue_usage() > 0.1 then clock_timestamp()
            -- It rings with the commit.
            when pg_notify('@channel@', '') is not null then clock_timestamp()
        end;
    else
        alter table only @schema@.event alter column created_at set default clock_timestamp();
    end if;
    update @schema@.meta set doorbell = is_on;
end
$$;
select @schema@.set_doorbell(coalesce(
    (select tgenabled <> 'D' from pg_trigger where tgrelid = '@schema@.event'::regclass and tgname = 'doorbell'), false
));
drop trigger if exists doorbell on @schema@.event;
drop function @schema@.ring();
