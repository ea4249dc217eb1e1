-- breaking: no
-- What people ask for costs nothing for what is dead or delayed.

-- Serves `list` and `requeue` by state, in log order.
create index pillarbox_delivery_by_state on pillarbox_delivery (subscription, state, position);

-- Serves `requeue` by version. Empty where nobody appends.
create index pillarbox_event_stream on pillarbox_event (key, stream_version) where stream_version is not null;

-- How many deliveries are dead or delayed: nobody counts a million rows for a status.
create table pillarbox_aside_count (
    subscription integer not null,
    state text not null,
    count integer not null,
    primary key (subscription, state)
) strict, without rowid;
insert into pillarbox_aside_count (subscription, state, count)
select subscription, state, count(*) from pillarbox_delivery where state in ('dead', 'delayed') group by subscription, state;

create trigger pillarbox_count_insert after insert on pillarbox_delivery when new.state in ('dead', 'delayed')
begin
    insert into pillarbox_aside_count (subscription, state, count) values (new.subscription, new.state, 1)
    on conflict (subscription, state) do update set count = count + 1;
end;
create trigger pillarbox_count_delete after delete on pillarbox_delivery when old.state in ('dead', 'delayed')
begin
    update pillarbox_aside_count set count = count - 1 where subscription = old.subscription and state = old.state;
end;
create trigger pillarbox_count_leave after update of state on pillarbox_delivery
when old.state <> new.state and old.state in ('dead', 'delayed')
begin
    update pillarbox_aside_count set count = count - 1 where subscription = old.subscription and state = old.state;
end;
create trigger pillarbox_count_enter after update of state on pillarbox_delivery
when old.state <> new.state and new.state in ('dead', 'delayed')
begin
    insert into pillarbox_aside_count (subscription, state, count) values (new.subscription, new.state, 1)
    on conflict (subscription, state) do update set count = count + 1;
end;

-- As before; and what is stored, by which rows are found.
drop view pillarbox_delivery_state;
create view pillarbox_delivery_state as
select
    d.subscription, d.position, d.lane, d.arrival, d.key, d.attempts, d.due_at, d.since, d.errors, d.owner, d.claimed_at,
    case
        when d.state = 'delayed' and d.due_at <= cast((julianday('now') - 2440587.5) * 86400000 + 0.5 as integer)
            then 'pending'
        when d.key is not null and d.state in ('pending', 'retrying') and (
            exists (
                select 1
                from pillarbox_delivery as head
                where head.subscription = d.subscription and head.key = d.key
                    and head.state in ('pending', 'processing', 'retrying') and head.arrival < d.arrival
            )
            or s.on_dead = 'block' and exists (
                select 1
                from pillarbox_delivery as head
                where head.subscription = d.subscription and head.key = d.key
                    and head.state = 'dead' and head.arrival < d.arrival
            )
        ) then 'blocked'
        else d.state
    end as state,
    d.state as stored
from pillarbox_delivery as d
join pillarbox_subscription as s on s.id = d.subscription;
