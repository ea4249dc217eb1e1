-- Settings and state of the file and of a connection.

-- name: data_version
pragma data_version

-- name: turn_on_wal
pragma journal_mode = wal

-- name: journal_mode
pragma journal_mode

-- name: checkpoint
pragma wal_checkpoint(passive)

-- name: checkpoint_and_truncate
pragma wal_checkpoint(truncate)

-- name: file_bytes
select page_count * page_size from pragma_page_count, pragma_page_size
