select id from pillarbox_dedup where topic = ?1 and key = ?2 and dedup_key = ?3 and created_at >= ?4
