delete from pillarbox_progress
where floor_to < ?1 - 1
    and id < (
        select max(id)
        from pillarbox_progress as newest
        where newest.subscription = pillarbox_progress.subscription and newest.lane = pillarbox_progress.lane
    )
