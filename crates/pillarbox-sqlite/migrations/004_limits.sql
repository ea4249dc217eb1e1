-- breaking: no
-- Headers and content types have limits too. The checks are written into the table's definition, as SQLite's manual says; what is there
-- stays, and is delivered.
pragma writable_schema = on;
update sqlite_master
set sql = replace(
    sql,
    'constraint deliver_at_is_integer_milliseconds_since_1970',
    'constraint headers_has_at_most_65536_bytes check (length(cast(headers as blob)) <= 65536),
    constraint content_type_has_at_most_255_bytes check (length(cast(content_type as blob)) <= 255),
    constraint deliver_at_is_integer_milliseconds_since_1970'
)
where name = 'pillarbox_event';
pragma writable_schema = reset;
-- A change that every connection notices.
create table pillarbox_changed (one integer);
drop table pillarbox_changed;
