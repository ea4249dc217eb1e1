-- Publishers wait behind us while we wait.
set local lock_timeout = '100ms';
do $$
declare
    leaf regclass;
begin
    alter table @schema@.event drop constraint payload_has_at_most_payload_bytes_max_bytes;
    -- A leaf that was made alone has the constraint as its own too.
    for leaf in select inhrelid from pg_inherits where inhparent = '@schema@.event'::regclass loop
        execute format('alter table %s drop constraint if exists payload_has_at_most_payload_bytes_max_bytes', leaf);
    end loop;
    alter table @schema@.event add constraint payload_has_at_most_payload_bytes_max_bytes check (
        pg_column_size(payload) <= @size@ and pg_column_size(payload_bytes) <= @size@
    ) not valid;
end
$$
