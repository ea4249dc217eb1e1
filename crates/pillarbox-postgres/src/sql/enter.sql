insert into instance (id, host, pid, version, subscriptions)
overriding system value
values ($1, $2, $3, $4, $5)
