insert into cursor (subscription, lane, floor, settled, epoch)
values ($1, $2, $3, $4::text::int8multirange, $5)
