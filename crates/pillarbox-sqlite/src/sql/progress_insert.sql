insert into pillarbox_progress (subscription, lane, epoch, floor_from, floor_to, started_at, ended_at)
values (?1, ?2, ?3, ?4, ?5, ?6, ?6)
