-- Read after the anchors: whatever retention took away before they were read shows in pruned_to now.
select
    -- A journal may begin below.
    pruned_to + 1,
    exists (
        select from pg_trigger
        where tgrelid = 'event'::regclass and tgname = 'doorbell' and tgenabled in ('O', 'A')
    ),
    clock_timestamp(),
    -- Whether there are enough changes to be added up.
    (select count(*) from (select from aside_count limit 1000) as changes) = 1000
from meta
