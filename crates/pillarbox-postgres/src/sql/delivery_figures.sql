select subscription, state, count(*)
from delivery_state
group by subscription, state
