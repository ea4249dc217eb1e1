select subscription, state, count(*)
from pillarbox_delivery_state
group by subscription, state
