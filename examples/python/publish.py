"""Places orders and publishes an event for each, by plain INSERT in the transaction of the order itself.

    python3 publish.py DATABASE [PAYLOADS]

DATABASE is a SQLite file that `pillarbox migrate` has prepared. PAYLOADS is a JSON file with an array of texts, each
the payload of one order; without it one order is placed.
"""

import json
import sqlite3
import sys


def place_order(connection: sqlite3.Connection, payload: str) -> int:
    """The order and its event: both are there after the commit, or neither is."""
    # IMMEDIATE: a deferred transaction fails, without waiting, if another writer came between its read and its write.
    connection.execute("begin immediate")
    try:
        order = connection.execute("insert into python_orders (content) values (?)", (payload,)).lastrowid
        connection.execute(
            "insert into pillarbox_event (topic, key, type, payload) values (?, ?, ?, ?)",
            ("orders", f"python-{order}", "order.placed", payload),
        )
        connection.execute("commit")
        return order
    except BaseException:
        connection.execute("rollback")
        raise


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python3 publish.py DATABASE [PAYLOADS]", file=sys.stderr)
        return 2
    payloads = [json.dumps({"customer": "Ada", "total": 4200})]
    if len(sys.argv) == 3:
        with open(sys.argv[2], encoding="utf-8") as file:
            payloads = json.load(file)
    # isolation_level None: this program begins and ends its transactions itself. It waits for other writers.
    connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=10)
    connection.execute("create table if not exists python_orders (id integer primary key, content text not null)")
    for payload in payloads:
        print(f"placed order {place_order(connection, payload)}")
    connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
