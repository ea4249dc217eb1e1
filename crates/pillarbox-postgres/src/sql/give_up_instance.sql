-- Ends an instance: its lanes are free under a new epoch, its claims go back as if they had never been made.
with lanes as (
    update cursor set owner = null, epoch = epoch + 1 where owner = $1::integer
), claims as (
    update delivery
    set state = case when attempts > 0 then 'retrying' else 'pending' end, ready_at = greatest(due_at, clock_timestamp()),
        owner = null, claim = null, claimed_at = null
    where owner = $1
)
delete from instance where id = $1
