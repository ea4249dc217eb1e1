-- Read after the anchors: whatever retention took away before they were read shows in pruned_to now.
select
    -- A journal may begin below.
    pruned_to + 1,
    doorbell,
    clock_timestamp(),
    -- Whether there are enough changes to be added up.
    (select count(*) from (select from aside_count limit 1000) as changes) = 1000
from meta
