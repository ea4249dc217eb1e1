"""Places orders and publishes an event for each with SQLAlchemy, in the transaction of the order itself.

    python3 publish_sqlalchemy.py DATABASE_URL [PAYLOADS]

DATABASE_URL is a PostgreSQL database that `pillarbox migrate` has prepared. PAYLOADS is a JSON file with an array of texts,
each the payload of one order; without it one order is placed.
"""

import json
import sys

from sqlalchemy import create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "sqlalchemy_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[str]


PUBLISH = text(
    """
    insert into pillarbox.event (topic, key, type, payload)
    values (:topic, :key, :type, cast(:payload as json))
    """
)


def place_order(session: Session, payload: str) -> int:
    """The order and its event: both are there after the commit, or neither is."""
    with session.begin():
        order = Order(content=payload)
        session.add(order)
        session.flush()
        session.execute(
            PUBLISH,
            {"topic": "orders", "key": f"sqlalchemy-{order.id}", "type": "order.placed", "payload": payload},
        )
        return order.id


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python3 publish_sqlalchemy.py DATABASE_URL [PAYLOADS]", file=sys.stderr)
        return 2
    payloads = [json.dumps({"customer": "Ada", "total": 4200})]
    if len(sys.argv) == 3:
        with open(sys.argv[2], encoding="utf-8") as file:
            payloads = json.load(file)
    engine = create_engine(sys.argv[1].replace("postgres://", "postgresql+psycopg://", 1))
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        for payload in payloads:
            print(f"placed order {place_order(session, payload)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
