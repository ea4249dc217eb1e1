insert into pillarbox_instance (id, host, pid, version, started_at, beat_at, subscriptions)
values (?1, ?2, ?3, ?4, ?5, ?5, ?6)
