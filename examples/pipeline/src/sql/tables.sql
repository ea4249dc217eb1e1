create table if not exists conversation (
    name text primary key,
    messages bigint not null
);

create table if not exists message (
    conversation text not null,
    number bigint not null,
    author text not null,
    body text not null,
    primary key (conversation, number)
);

-- No keys from here on: nothing but Pillarbox keeps a row from being written twice.
create table if not exists mention (
    person text not null,
    conversation text not null,
    message bigint not null
);

create table if not exists activity (
    person text not null,
    number bigint not null,
    conversation text not null,
    message bigint not null,
    broadcasts bigint not null
);

create table if not exists author (
    name text primary key,
    messages bigint not null
);
