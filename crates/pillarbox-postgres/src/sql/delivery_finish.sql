-- Each is looked up by the primary key, as claim_end.sql says.
delete from delivery as d
using unnest($1::bigint[], $2::integer[], $3::bigint[], $4::bigint[]) as w (subscription, lane, epoch, position)
join cursor as c on c.subscription = w.subscription and c.lane = w.lane and c.epoch = w.epoch
where d.subscription = any (array[w.subscription]) and d.position = w.position
