"""Consumes the events that Pillarbox adds to a Redis stream, each once, and sums up what customers have ordered.

    python3 redis_consumer.py REDIS_URL STREAM [--once]

Several may run at once: they share a consumer group, and then the order of a key is no longer kept. The total, the fact
that the event was seen and its acknowledgement are written in one transaction, so that a crash at any moment neither loses
an event nor counts one twice. With --once it ends when there is nothing left.
"""

import json
import os
import socket
import sys

import redis

GROUP = "totals"
# A duplicate comes soon after the first, or when somebody rewinds the subscription; this is how long ago that may be.
SEEN_SECONDS = 7 * 24 * 3600
# Another consumer that holds an entry for longer than this is taken to be dead.
ABANDONED_MS = 60_000
WAIT_MS = 5_000


def apply(transaction: redis.client.Pipeline, fields: dict[bytes, bytes], stream: str) -> None:
    """The effect. It is queued in the transaction, not done yet."""
    if b"data" not in fields:
        return  # A tombstone: an event without a payload.
    if fields[b"ce_type"] == b"order.placed":
        order = json.loads(fields[b"data"])
        transaction.hincrby(f"{stream}:totals", fields[b"ce_subject"], order["total"])


def handle(client: redis.Redis, stream: str, entry: bytes, fields: dict[bytes, bytes]) -> bool:
    """Applies an event unless it was seen before, and acknowledges the entry; whether it was new."""
    seen = f"{stream}:{GROUP}:seen:{fields[b'ce_id'].decode()}"
    with client.pipeline() as transaction:
        while True:
            try:
                # If somebody else handles a duplicate at the same time, one of the two begins again.
                transaction.watch(seen)
                new = not transaction.exists(seen)
                transaction.multi()
                if new:
                    apply(transaction, fields, stream)
                    transaction.set(seen, 1, ex=SEEN_SECONDS)
                transaction.xack(stream, GROUP, entry)
                transaction.execute()
                return new
            except redis.WatchError:
                continue


def batches(client: redis.Redis, stream: str, consumer: str, once: bool):
    """Entries that some consumer took and did not live to acknowledge, then new ones, again and again."""
    abandoned = 0 if once else ABANDONED_MS
    wait = None if once else WAIT_MS
    while True:
        _, claimed, *_ = client.xautoclaim(stream, GROUP, consumer, min_idle_time=abandoned, count=100)
        found = client.xreadgroup(GROUP, consumer, {stream: ">"}, count=100, block=wait)
        new = [entry for _, entries in found or [] for entry in entries]
        if once and not claimed and not new:
            return
        yield claimed + new


def main() -> int:
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["--once"]):
        print("usage: python3 redis_consumer.py REDIS_URL STREAM [--once]", file=sys.stderr)
        return 2
    client, stream = redis.Redis.from_url(sys.argv[1], protocol=2), sys.argv[2]
    try:
        client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    except redis.ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise
    consumer = f"{socket.gethostname()}-{os.getpid()}"
    for entries in batches(client, stream, consumer, once=sys.argv[3:] == ["--once"]):
        for entry, fields in entries:
            new = handle(client, stream, entry, fields)
            print(f"{fields[b'ce_type'].decode()} {fields[b'ce_id'].decode()}{'' if new else ' (a duplicate)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
