insert into progress (subscription, lane, epoch, floor_from, floor_to)
values ($1, $2, $3, $4, $5)
