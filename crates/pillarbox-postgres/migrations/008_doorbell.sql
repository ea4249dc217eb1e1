-- A relay that sleeps holds the bell's lock alone: whoever cannot share it rings. Nobody asleep, nobody who listens: no ring. The lock is
-- let go in the same breath; whoever looked before a relay fell asleep is found by the lock that it has on the table. Relays of an older
-- version are not rung any more and look every poll_interval: replace them soon.
do $$
declare
    enabled "char" := (select tgenabled from pg_trigger where tgrelid = '@schema@.event'::regclass and tgname = 'doorbell');
begin
    if enabled is null then
        return;
    end if;
    create or replace trigger doorbell after insert on @schema@.event
    for each statement when (
        case when pg_try_advisory_lock_shared(@class@, 0) then not pg_advisory_unlock_shared(@class@, 0) else true end
    ) execute function @schema@.ring();
    -- Replaced, it is on.
    case enabled
        when 'D' then alter table only @schema@.event disable trigger doorbell;
        when 'A' then alter table only @schema@.event enable always trigger doorbell;
        when 'R' then alter table only @schema@.event enable replica trigger doorbell;
        else null;
    end case;
end
$$;
