-- Records about pruned events, except for the newest of each lane, and for what is said about a journal's events that stay.
delete from progress as p
where p.floor_to < (select pruned_to from meta)
    and exists (select from progress as n where n.subscription = p.subscription and n.lane = p.lane and n.id > p.id)
    -- Not as an anti join, which might read all of the log.
    and (
        select e.position
        from event as e
        where e.position > p.floor_from and e.position <= p.floor_to
        order by e.position
        limit 1
    ) is null
