-- What a publisher asks a log before it publishes.

-- name: limit_on_sqlite
select value from pillarbox_meta where name = 'payload_bytes_max'

-- name: limit_on_postgres
select @schema@.payload_bytes_max()::bigint
