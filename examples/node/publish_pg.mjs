// Places orders and publishes an event for each with pg, in the transaction of the order itself.
//
//   node publish_pg.mjs DATABASE_URL [PAYLOADS]
//
// DATABASE_URL is a PostgreSQL database that `pillarbox migrate` has prepared. PAYLOADS is a JSON file with an array of
// texts, each the payload of one order; without it one order is placed.
import { readFileSync } from "node:fs";
import pg from "pg";

/** The order and its event: both are there after the commit, or neither is. */
async function placeOrder(client, payload) {
  await client.query("begin");
  try {
    const inserted = await client.query("insert into node_orders (content) values ($1) returning id", [payload]);
    const order = inserted.rows[0].id;
    await client.query(
      "insert into pillarbox.event (topic, key, type, payload) values ($1, $2, $3, $4::text::json)",
      ["orders", `pg-${order}`, "order.placed", payload],
    );
    await client.query("commit");
    return order;
  } catch (error) {
    await client.query("rollback");
    throw error;
  }
}

const [url, payloadsPath] = process.argv.slice(2);
if (!url) {
  console.error("usage: node publish_pg.mjs DATABASE_URL [PAYLOADS]");
  process.exit(2);
}
const client = new pg.Client({ connectionString: url });
await client.connect();
await client.query(
  "create table if not exists node_orders (id bigint generated always as identity, content text not null)",
);
const payloads = payloadsPath
  ? JSON.parse(readFileSync(payloadsPath, "utf8"))
  : [JSON.stringify({ customer: "Ada", total: 4200 })];
for (const payload of payloads) {
  console.log(`placed order ${await placeOrder(client, payload)}`);
}
await client.end();
