use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pillarbox_testkit::postgres::Server;
use rusqlite::Connection;
use tempfile::TempDir;

/// How often one of the two is killed.
const KILLS: usize = 30;

/// The longest time between two kills; not a wait for anything, but when the next one strikes.
const LIFE_MS_MAX: u64 = 250;

/// More than can be delivered before the last kill, so that none of them strikes when all is done.
const ORDERS: i64 = 3_000;

/// How long the two may take for the rest when nobody kills them any more.
const PATIENCE: Duration = Duration::from_secs(60);

const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Shop,
    Billing,
}

/// Where the services keep their data.
enum Databases {
    Sqlite(TempDir),
    Postgres(pillarbox_testkit::postgres::Database, pillarbox_testkit::postgres::Database),
}

impl Databases {
    fn of(&self, side: Side) -> String {
        match (self, side) {
            (Databases::Sqlite(folder), Side::Shop) => folder.path().join("shop.db").display().to_string(),
            (Databases::Sqlite(folder), Side::Billing) => folder.path().join("billing.db").display().to_string(),
            (Databases::Postgres(shop, _), Side::Shop) => shop.url().to_owned(),
            (Databases::Postgres(_, billing), Side::Billing) => billing.url().to_owned(),
        }
    }

    /// One number out of a service's database; None before it has its tables.
    fn number(&self, side: Side, sql: &str) -> Option<i64> {
        match self {
            Databases::Sqlite(_) => {
                let connection = Connection::open(self.of(side)).unwrap();
                connection.busy_timeout(PATIENCE).unwrap();
                connection.query_row(sql, [], |row| row.get(0)).ok()
            }
            Databases::Postgres(shop, billing) => {
                let database = if side == Side::Shop { shop } else { billing };
                database.psql(sql).ok()?.trim().parse().ok()
            }
        }
    }
}

/// Both services, to be killed.
struct Services {
    databases: Databases,
    address: String,
    shop: Child,
    billing: Child,
}

impl Services {
    fn start(databases: Databases) -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let shop = spawn(&databases, Side::Shop, &address, false);
        let billing = spawn(&databases, Side::Billing, &address, false);
        Services { databases, address, shop, billing }
    }

    /// Kills one side wherever it is, and starts it again.
    fn kill(&mut self, side: Side) {
        let child = if side == Side::Shop { &mut self.shop } else { &mut self.billing };
        assert_eq!(child.try_wait().unwrap(), None, "a service ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        *child = spawn(&self.databases, side, &self.address, false);
    }

    /// Lets billing crash between a commit and its answer, so that one message comes twice for certain.
    fn crash_before_answer(&mut self) {
        self.billing.kill().unwrap();
        self.billing.wait().unwrap();
        self.billing = spawn(&self.databases, Side::Billing, &self.address, true);
        until("billing has crashed", || self.billing.try_wait().unwrap().is_some());
        self.billing = spawn(&self.databases, Side::Billing, &self.address, false);
    }

    fn billed(&self) -> i64 {
        self.databases.number(Side::Billing, "select count(distinct order_number) from invoice").unwrap_or(0)
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        for child in [&mut self.shop, &mut self.billing] {
            // Either may have gone.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn spawn(databases: &Databases, side: Side, address: &str, crash: bool) -> Child {
    let mut command = Command::new(match side {
        Side::Shop => env!("CARGO_BIN_EXE_shop"),
        Side::Billing => env!("CARGO_BIN_EXE_billing"),
    });
    command.arg(databases.of(side)).arg(address).stderr(Stdio::null());
    if side == Side::Shop {
        command.arg(ORDERS.to_string());
    }
    if crash {
        command.env("CRASH_BEFORE_ANSWER", "1");
    }
    command.spawn().unwrap()
}

fn until(what: &str, met: impl FnMut() -> bool) {
    assert!(is_met(met), "never: {what}");
}

/// Looks again and again.
fn is_met(mut met: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !met() {
        if started.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Numbers that look random and are the same in each run.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn check_exactly_once(databases: Databases, kills: usize) {
    let mut services = Services::start(databases);
    until("the first order is billed", || services.billed() > 0);
    services.crash_before_answer();
    let mut seed = SEED;
    for _ in 0..kills {
        std::thread::sleep(Duration::from_millis(random(&mut seed) % LIFE_MS_MAX));
        services.kill(if random(&mut seed).is_multiple_of(2) { Side::Shop } else { Side::Billing });
    }
    let at_last_kill = services.billed();
    until("all orders are placed and billed", || services.billed() == ORDERS);
    let of = |side, sql| services.databases.number(side, sql).unwrap();
    assert_eq!(of(Side::Billing, "select count(*) from invoice"), ORDERS, "an order was billed twice");
    let sum = of(Side::Shop, "select cast(sum(cents) as bigint) from placed");
    assert_eq!(of(Side::Billing, "select cast(sum(cents) as bigint) from invoice"), sum);
    assert!(of(Side::Billing, "select count(*) from repeated") > 0, "no message came twice: the inbox was not needed");
    assert!(at_last_kill < ORDERS, "all was done before the last kill");
}

#[test]
fn on_sqlite_every_order_is_billed_once_whoever_is_killed() {
    check_exactly_once(Databases::Sqlite(tempfile::tempdir().unwrap()), KILLS);
}

#[test]
fn on_postgresql_every_order_is_billed_once_whoever_is_killed() {
    let database = || Server::shared().create_database().unwrap();
    check_exactly_once(Databases::Postgres(database(), database()), KILLS / 3);
}
