-- It is ready if nothing of its key stands before it.
insert into pillarbox_delivery (
    subscription, position, lane, arrival, key, state, attempts, due_at, since, died_at, errors, owner, claim, claimed_at, ready_at
)
values (
    ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, case ?6 when 'dead' then ?10 end, ?11, ?12, ?13, case when ?12 is not null then ?10 end,
    case
        when ?6 in ('pending', 'retrying')
            and not exists (
                select 1
                from pillarbox_delivery
                where subscription = ?1 and key = ?5 and state in ('pending', 'processing', 'retrying')
            )
            and not exists (
                select 1
                from pillarbox_delivery as dead
                join pillarbox_subscription as s on s.id = dead.subscription
                where dead.subscription = ?1 and dead.key = ?5 and dead.state = 'dead' and s.on_dead = 'block'
            )
            then max(?8, ?10)
    end
)
on conflict (subscription, position) do nothing
returning ready_at
