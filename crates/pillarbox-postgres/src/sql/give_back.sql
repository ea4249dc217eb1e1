-- The claims of an instance that ends by itself go back as if they had never been made.
update delivery
set state = case when attempts > 0 then 'retrying' else 'pending' end, ready_at = greatest(due_at, clock_timestamp()),
    owner = null, claim = null, claimed_at = null
where owner = $1::integer
