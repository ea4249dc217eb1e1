insert into pillarbox_event (id, topic, key, type, payload, content_type, headers, deliver_at, created_at)
values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
