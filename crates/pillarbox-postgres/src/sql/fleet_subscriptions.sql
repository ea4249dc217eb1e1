select id, name, filter, lanes, paused from subscription order by id
