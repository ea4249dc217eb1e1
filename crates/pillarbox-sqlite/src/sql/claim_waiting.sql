select count(*)
from (
    select 1
    from pillarbox_delivery
    where subscription = ?1 and ready_at <= ?2
    limit ?3
)
