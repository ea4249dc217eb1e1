insert into activity (person, number, conversation, message, broadcasts)
select cast($1 as text), coalesce(max(number), 0) + 1, cast($2 as text), cast($3 as bigint), 0 from activity where person = $1
returning number
