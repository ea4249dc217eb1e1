delete from pillarbox_inbox
where (consumer, id) in (
    select consumer, id from pillarbox_inbox where accepted_at < ?1 order by accepted_at limit ?2
)
