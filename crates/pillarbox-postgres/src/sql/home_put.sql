update meta
set system_identifier = $1, database = $2, database_oid = $3, event_oid = $4, timeline = $5, address = $6, port = $7,
    reached_as = $8
