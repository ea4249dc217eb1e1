select system_identifier, database, database_oid, event_oid, timeline, address, port, reached_as, log_id from meta
