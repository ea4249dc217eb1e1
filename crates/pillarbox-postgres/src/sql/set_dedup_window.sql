lock table dedup_0, dedup_1, dedup_2 in exclusive mode;
do $$
declare
    target text;
begin
    create temporary table moved on commit drop as
    select distinct on (d.digest) d.*
    from (select * from dedup_0 union all select * from dedup_1 union all select * from dedup_2) as d
    where d.created_at >= (select window_at from dedup_window())
    order by d.digest, d.created_at;
    delete from dedup_0;
    delete from dedup_1;
    delete from dedup_2;
    select current_table into target from dedup_window();
    execute format('insert into %I select * from moved', target);
    drop table moved;
end
$$
