insert into pillarbox_meta (name, value) values (?1, ?2)
on conflict (name) do update set value = excluded.value
