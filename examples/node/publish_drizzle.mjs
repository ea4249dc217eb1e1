// Places orders and publishes an event for each with Drizzle, in the transaction of the order itself.
//
//   node publish_drizzle.mjs DATABASE_URL [PAYLOADS]
//
// DATABASE_URL is a PostgreSQL database that `pillarbox migrate` has prepared. PAYLOADS is a JSON file with an array of
// texts, each the payload of one order; without it one order is placed.
import { readFileSync } from "node:fs";
import { sql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import { bigint, pgTable, text } from "drizzle-orm/pg-core";
import pg from "pg";

const orders = pgTable("drizzle_orders", {
  id: bigint("id", { mode: "number" }).generatedAlwaysAsIdentity(),
  content: text("content").notNull(),
});

/** The order and its event: both are there after the commit, or neither is. */
function placeOrder(database, payload) {
  return database.transaction(async (tx) => {
    const [order] = await tx.insert(orders).values({ content: payload }).returning({ id: orders.id });
    await tx.execute(sql`
      insert into pillarbox.event (topic, key, type, payload)
      values (${"orders"}, ${`drizzle-${order.id}`}, ${"order.placed"}, ${payload}::text::json)
    `);
    return order.id;
  });
}

const [url, payloadsPath] = process.argv.slice(2);
if (!url) {
  console.error("usage: node publish_drizzle.mjs DATABASE_URL [PAYLOADS]");
  process.exit(2);
}
const pool = new pg.Pool({ connectionString: url });
const database = drizzle(pool);
await database.execute(
  sql`create table if not exists drizzle_orders (id bigint generated always as identity, content text not null)`,
);
const payloads = payloadsPath
  ? JSON.parse(readFileSync(payloadsPath, "utf8"))
  : [JSON.stringify({ customer: "Ada", total: 4200 })];
for (const payload of payloads) {
  console.log(`placed order ${await placeOrder(database, payload)}`);
}
await pool.end();
