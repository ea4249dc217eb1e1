-- How many deliveries of a queue wait for their turn or are worked on. What is dead or delayed waits for nothing of the kind, however
-- much there is of it.
select count(*) from delivery as d where d.subscription = $1 and d.state in ('pending', 'retrying', 'processing')
