-- Records about pruned events, except for the newest of each lane.
delete from progress as p
where p.floor_to < (select log_start from meta) - 1
    and exists (select from progress as n where n.subscription = p.subscription and n.lane = p.lane and n.id > p.id)
