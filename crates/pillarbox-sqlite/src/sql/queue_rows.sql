select count(*) from pillarbox_delivery where subscription = ?1 and state in ('pending', 'retrying', 'processing')
