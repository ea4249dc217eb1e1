select floor, settled, anchor_position, anchor_id, subscription, lane, owner, epoch, revision
from pillarbox_cursor
order by subscription, lane
