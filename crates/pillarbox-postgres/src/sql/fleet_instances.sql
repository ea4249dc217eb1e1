select id, beat, subscriptions, report from instance order by id
