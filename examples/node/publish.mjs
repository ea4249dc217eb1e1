// Places orders and publishes an event for each, by plain INSERT in the transaction of the order itself.
//
//   node publish.mjs DATABASE [PAYLOADS]
//
// DATABASE is a SQLite file that `pillarbox migrate` has prepared. PAYLOADS is a JSON file with an array of texts,
// each the payload of one order; without it one order is placed.
import { readFileSync } from "node:fs";

/** The SQLite of Node itself (22.5 and newer), else a package with the same interface. */
async function sqlite() {
  try {
    return await import("node:sqlite");
  } catch {
    return await import("@photostructure/sqlite");
  }
}

/** The order and its event: both are there after the commit, or neither is. */
function placeOrder(database, payload) {
  // IMMEDIATE: a deferred transaction fails, without waiting, if another writer came between its read and its write.
  database.exec("begin immediate");
  try {
    const order = database.prepare("insert into node_orders (content) values (?)").run(payload).lastInsertRowid;
    database
      .prepare("insert into pillarbox_event (topic, key, type, payload) values (?, ?, ?, ?)")
      .run("orders", `node-${order}`, "order.placed", payload);
    database.exec("commit");
    return order;
  } catch (error) {
    database.exec("rollback");
    throw error;
  }
}

const [path, payloadsPath] = process.argv.slice(2);
if (!path) {
  console.error("usage: node publish.mjs DATABASE [PAYLOADS]");
  process.exit(2);
}
const { DatabaseSync } = await sqlite();
const database = new DatabaseSync(path);
// Other writers have the file now and then; wait for them.
database.exec("pragma busy_timeout = 10000");
database.exec("create table if not exists node_orders (id integer primary key, content text not null)");
const payloads = payloadsPath
  ? JSON.parse(readFileSync(payloadsPath, "utf8"))
  : [JSON.stringify({ customer: "Ada", total: 4200 })];
for (const payload of payloads) {
  console.log(`placed order ${placeOrder(database, payload)}`);
}
database.close();
