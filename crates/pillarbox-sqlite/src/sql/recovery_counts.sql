select subscription, cause, count, last_at
from pillarbox_recovery
order by subscription, cause
