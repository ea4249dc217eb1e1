select subscription, cause, count, last_at
from recovery
order by subscription, cause
