insert into author (name, messages) values ($1, 1)
on conflict (name) do update set messages = author.messages + 1
