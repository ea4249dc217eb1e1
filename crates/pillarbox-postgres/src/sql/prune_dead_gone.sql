-- Those that an operator has called back meanwhile are not dead any more.
delete from delivery as d
using unnest($1::bigint[], $2::bigint[]) as w (subscription, position)
where d.subscription = any (array[w.subscription]) and d.position = w.position and d.died_at < $3::timestamptz
returning d.subscription, d.position, case when d.queued then d.key end
