-- What was given up before $1 and is gone, except for a journal's events, which stay.
delete from skip as s
where s.position_to <= (select pruned_to from meta)
    and s.at < $1::timestamptz
    and (
        select e.position
        from event as e
        where e.position >= s.position and e.position <= s.position_to
        order by e.position
        limit 1
    ) is null
