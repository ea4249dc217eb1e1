insert into pillarbox_recovery (subscription, cause, count, last_at) values (?1, ?2, ?3, ?4)
on conflict (subscription, cause) do update set count = count + excluded.count, last_at = excluded.last_at
