insert into pillarbox_inbox (consumer, id) values (?1, ?2) on conflict do nothing
