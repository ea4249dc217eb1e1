"""Places orders and publishes an event for each with psycopg, in the transaction of the order itself.

    python3 publish_psycopg.py DATABASE_URL [PAYLOADS]

DATABASE_URL is a PostgreSQL database that `pillarbox migrate` has prepared. PAYLOADS is a JSON file with an array of texts,
each the payload of one order; without it one order is placed.
"""

import json
import sys

import psycopg


def place_order(connection: psycopg.Connection, payload: str) -> int:
    """The order and its event: both are there after the commit, or neither is."""
    with connection.transaction():
        insert = "insert into python_orders (content) values (%s) returning id"
        (order,) = connection.execute(insert, (payload,)).fetchone()
        connection.execute(
            "insert into pillarbox.event (topic, key, type, payload) values (%s, %s, %s, %s::json)",
            ("orders", f"psycopg-{order}", "order.placed", payload),
        )
    return order


def remind(connection: psycopg.Connection, order: int) -> str:
    """The function does the same, and more: once for a dedup_key, later by deliver_at, bytes by publish_bytes."""
    with connection.transaction():
        (event,) = connection.execute(
            """
            select pillarbox.publish(
                topic => 'reminders', type => 'reminder.due', payload => %s::jsonb, key => %s::text,
                deliver_at => now() + interval '1 hour', dedup_key => %s::text
            )
            """,
            (json.dumps({"order": order}), f"psycopg-{order}", f"reminder-{order}"),
        ).fetchone()
    return str(event)


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python3 publish_psycopg.py DATABASE_URL [PAYLOADS]", file=sys.stderr)
        return 2
    payloads = [json.dumps({"customer": "Ada", "total": 4200})]
    if len(sys.argv) == 3:
        with open(sys.argv[2], encoding="utf-8") as file:
            payloads = json.load(file)
    # Behind a PgBouncer before 1.21 in transaction mode: also prepare_threshold=None.
    with psycopg.connect(sys.argv[1], autocommit=True) as connection:
        connection.execute(
            "create table if not exists python_orders (id bigint generated always as identity, content text not null)"
        )
        for payload in payloads:
            order = place_order(connection, payload)
            print(f"placed order {order}, reminder {remind(connection, order)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
