"""Receives events from Pillarbox's http sink: verifies each signature and gives each event its effect exactly once.

    WEBHOOK_SECRET="whsec_..." python3 webhook_receiver.py DATABASE [PORT]

Needs nothing but Python's standard library. DATABASE is a SQLite file of its own, made if it is missing. PORT 0, the
default, is any free one; the address is printed. While a secret is being changed, WEBHOOK_SECRET holds both, with a space
between them.

The effect here is a count of events by type; put your own statements in its place, in the same transaction.
"""

import base64
import hashlib
import hmac
import json
import os
import sqlite3
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# A request that is older or newer was recorded and is sent again, or one of the clocks is wrong.
TOLERANCE_SECONDS = 5 * 60
BODY_BYTES_MAX = 4 * 1024 * 1024
SCHEMA = """
create table if not exists inbox (id text primary key, received_at text not null default current_timestamp);
create table if not exists event_count (type text primary key, count integer not null);
"""


def keys_of(secrets: str) -> list[bytes]:
    """The keys in a list of secrets: base64, with or without whsec_ before it."""
    return [base64.b64decode(secret.removeprefix("whsec_")) for secret in secrets.split()]


def is_authentic(keys: list[bytes], headers, body: bytes, now: float) -> bool:
    """Whether somebody who knows one of the keys has sent this, and lately."""
    message_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not (timestamp.isascii() and timestamp.isdigit()) or abs(now - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    signed = f"{message_id}.{timestamp}.".encode() + body
    expected = ["v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys]
    given = headers.get("webhook-signature", "").split()
    # compare_digest takes the same time wherever the first difference is.
    return any([hmac.compare_digest(one.encode(), other.encode()) for one in given for other in expected])


def handle(connection: sqlite3.Connection, event: dict) -> None:
    """Remembers the event and gives it its effect, in one transaction: both are there after the commit, or neither is."""
    connection.execute("begin immediate")
    try:
        # The event's id is the same on every delivery.
        new = connection.execute("insert into inbox (id) values (?) on conflict do nothing", (event["id"],)).rowcount
        if new:
            connection.execute(
                "insert into event_count (type, count) values (?, 1) on conflict do update set count = count + 1",
                (event["type"],),
            )
        connection.execute("commit")
    except BaseException:
        connection.execute("rollback")
        raise


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body of an answer leave together, not one after the other's acknowledgement.
    wbufsize = -1
    database = ""
    keys: list[bytes] = []

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            return self.answer(411, close=True)
        if int(length) > BODY_BYTES_MAX:
            return self.answer(413, close=True)
        body = self.rfile.read(int(length))
        if not is_authentic(self.keys, self.headers, body, time.time()):
            return self.answer(401)
        try:
            content = json.loads(body)
            # Batched mode sends an array; an event of it that is known already has no effect again.
            events = content if isinstance(content, list) else [content]
            known = all(isinstance(event["id"], str) and isinstance(event["type"], str) for event in events)
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            return self.answer(400)
        connection = sqlite3.connect(self.database, isolation_level=None, timeout=10)
        try:
            for event in events:
                handle(connection, event)
        except sqlite3.OperationalError as error:
            # Nothing was committed for this event: Pillarbox waits and sends it again.
            print(error, file=sys.stderr)
            return self.answer(503)
        finally:
            connection.close()
        self.answer(204)

    def answer(self, status: int, close: bool = False) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("content-length", "0")
        if close:
            self.send_header("connection", "close")
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


def main() -> int:
    if len(sys.argv) not in (2, 3) or not os.environ.get("WEBHOOK_SECRET"):
        print('usage: WEBHOOK_SECRET="whsec_..." python3 webhook_receiver.py DATABASE [PORT]', file=sys.stderr)
        return 2
    Receiver.database, Receiver.keys = sys.argv[1], keys_of(os.environ["WEBHOOK_SECRET"])
    connection = sqlite3.connect(Receiver.database)
    connection.execute("pragma journal_mode = wal")
    connection.executescript(SCHEMA)
    connection.close()
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) == 3 else 0), Receiver)
    print(f"listening on http://127.0.0.1:{server.server_port}/", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
