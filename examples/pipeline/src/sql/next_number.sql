insert into conversation (name, messages) values ($1, 1)
on conflict (name) do update set messages = conversation.messages + 1
returning messages
