"""Reads events from a Kafka topic into a database, each exactly once in effect.

    python3 kafka_consumer.py BROKERS TOPIC DATABASE [--until-end]

Kafka delivers at least once, and so does Pillarbox: a record can come twice. Here the effect of an event, its id and the
record's offset are written in one transaction of the consumer's own database (SQLite, for an example; any database with
transactions does). After a crash the offset, the id and the effect are all there, or none of them is.

The table `orders` has the newest payload of each key; a tombstone (a record without a value) deletes the key. With
--until-end it ends at the end of the topic instead of waiting for more.
"""

import sqlite3
import sys

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

SCHEMA = """
create table if not exists kafka_offset (topic text, part integer, next integer not null, primary key (topic, part));
create table if not exists event_seen (source text, id text, primary key (source, id)) without rowid;
create table if not exists orders (key text primary key, type text not null, content blob not null);
"""


def positions(consumer: Consumer, database: sqlite3.Connection, topic: str) -> list[TopicPartition]:
    """Where to go on: the offsets stand in our database, not in Kafka."""
    metadata = consumer.list_topics(topic, timeout=10).topics[topic]
    if metadata.error is not None:
        raise KafkaException(metadata.error)
    known = dict(database.execute("select part, next from kafka_offset where topic = ?", (topic,)))
    return [TopicPartition(topic, part, known.get(part, OFFSET_BEGINNING)) for part in metadata.partitions]


def take(database: sqlite3.Connection, record: Message) -> bool:
    """Takes one record in; false if its event was there already."""
    headers = {name: (value or b"").decode() for name, value in record.headers() or []}
    with database:  # One transaction: commit at the end, rollback on an exception.
        database.execute("begin immediate")
        database.execute(
            "insert into kafka_offset values (?, ?, ?) on conflict (topic, part) do update set next = excluded.next",
            (record.topic(), record.partition(), record.offset() + 1),
        )
        seen = database.execute(
            "insert into event_seen values (?, ?) on conflict do nothing", (headers["ce_source"], headers["ce_id"])
        )
        if seen.rowcount == 0:
            return False
        apply(database, headers, record)
    return True


def apply(database: sqlite3.Connection, headers: dict[str, str], record: Message) -> None:
    """What the event means to us."""
    key = (record.key() or b"").decode()
    if record.value() is None:
        database.execute("delete from orders where key = ?", (key,))
        return
    database.execute(
        """
        insert into orders values (?, ?, ?)
        on conflict (key) do update set type = excluded.type, content = excluded.content
        """,
        (key, headers["ce_type"], record.value()),
    )


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--until-end"]
    until_end = "--until-end" in sys.argv
    if len(arguments) != 3:
        print("usage: python3 kafka_consumer.py BROKERS TOPIC DATABASE [--until-end]", file=sys.stderr)
        return 2
    brokers, topic, path = arguments
    database = sqlite3.connect(path, isolation_level=None)
    database.executescript(SCHEMA)
    # The group's name is needed but not used: one consumer reads all partitions. For several, use subscribe() and give
    # the positions to assign() in its callback on_assign.
    settings = {"bootstrap.servers": brokers, "group.id": "orders", "enable.auto.commit": False}
    consumer = Consumer(settings | {"enable.partition.eof": until_end})
    counts = {True: 0, False: 0}
    try:
        assigned = positions(consumer, database, topic)
        consumer.assign(assigned)
        left = len(assigned)
        while left > 0:
            record = consumer.poll(1.0)
            if record is None:
                continue
            if record.error() is None:
                counts[take(database, record)] += 1
            elif record.error().code() == KafkaError._PARTITION_EOF:
                left -= 1
            else:
                raise KafkaException(record.error())
    except KeyboardInterrupt:
        pass
    finally:
        consumer.close()
        database.close()
    print(f"new events: {counts[True]}, events that were there already: {counts[False]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
