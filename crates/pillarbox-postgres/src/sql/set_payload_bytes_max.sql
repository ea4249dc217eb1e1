create or replace function @schema@.payload_bytes_max() returns integer language sql immutable parallel safe
as 'select @size@'
