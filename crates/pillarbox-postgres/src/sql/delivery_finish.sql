delete from delivery as d
using unnest($1::bigint[], $2::bigint[]) as w (subscription, position)
where d.subscription = w.subscription and d.position = w.position
