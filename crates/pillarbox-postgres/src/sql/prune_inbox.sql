delete from inbox
where ctid = any (array(
    select ctid
    from inbox
    where accepted_at < clock_timestamp() - $1 * interval '1 millisecond'
    order by accepted_at
    limit $2
))
