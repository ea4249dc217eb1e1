insert into pillarbox_skip (subscription, position, position_to, reason, at) values (?1, ?2, ?3, ?4, ?5)
on conflict (subscription, position) do update set
    position_to = max(position_to, excluded.position_to), reason = excluded.reason, at = excluded.at
