select floor, settled::text, anchor_position, anchor_id, subscription, lane, owner, epoch, revision
from cursor
order by subscription, lane
