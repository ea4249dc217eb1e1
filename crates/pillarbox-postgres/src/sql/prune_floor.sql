-- Who is furthest behind.
select s.name, min(c.floor)
from cursor as c
join subscription as s on s.id = c.subscription
group by s.id
order by 2, 1
limit 1
