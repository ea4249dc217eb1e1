use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use pillarbox_testkit::postgres::{Database, Server};
use rustix::process::{Pid, Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(60);

/// Places an order; the status of the answer.
pub(crate) async fn order(client: &reqwest::Client, address: SocketAddr, customer: &str) -> reqwest::Result<u16> {
    let body = format!(r#"{{"customer": "{customer}", "cents": 4200}}"#);
    let request = client.post(format!("http://{address}/orders")).header("content-type", "application/json");
    Ok(request.body(body).send().await?.status().as_u16())
}

/// The running program; killed when it is dropped.
struct Program {
    child: Child,
    lines: BufReader<ChildStdout>,
    address: SocketAddr,
}

impl Program {
    fn start(database: &Database) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pillarbox-example-axum-orders"));
        let mut child = command.args([database.url(), "127.0.0.1:0"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("listening on ") {
            line.clear();
            assert!(lines.read_line(&mut line).unwrap() > 0, "it has ended");
        }
        let address = line.trim().trim_start_matches("listening on ").parse().unwrap();
        Program { child, lines, address }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end; the last line that it said.
    fn end(mut self) -> (bool, String) {
        let last = self.lines.by_ref().lines().map(Result::unwrap).last().unwrap_or_default();
        (self.child.wait().unwrap().success(), last)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

async fn connect(database: &Database) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(database.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn number(client: &tokio_postgres::Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Orders that arrive while the program gets a signal: those that were answered are there, and each order gets one invoice after the
/// next start.
async fn check(signal: Signal, clean: bool) {
    let database = Server::shared().create_database().unwrap();
    let program = Program::start(&database);
    let (client, answered) = (reqwest::Client::new(), AtomicI64::new(0));
    let place = async |customer: usize| {
        // Until nothing answers any more.
        while let Ok(201) = order(&client, program.address, &format!("c{customer}")).await {
            answered.fetch_add(1, Ordering::Relaxed);
        }
    };
    let interrupt = async {
        while answered.load(Ordering::Relaxed) < 100 {
            tokio::task::yield_now().await;
        }
        program.signal(signal);
    };
    tokio::join!(place(0), place(1), place(2), place(3), interrupt);
    let (success, last) = tokio::task::spawn_blocking(move || program.end()).await.unwrap();
    assert_eq!((success, last == "stopped"), (clean, clean), "{last}");
    let database_client = connect(&database).await;
    let orders = number(&database_client, "select count(*) from orders").await;
    let answered = answered.into_inner();
    assert!(if clean { orders == answered } else { orders >= answered }, "{answered} answered, {orders} there");
    if clean {
        let claimed = "select count(*) from pillarbox.delivery where owner is not null";
        assert_eq!(number(&database_client, claimed).await, 0, "nothing was left in the middle");
    }
    let again = Program::start(&database);
    let booked = async { while number(&database_client, "select count(*) from invoice").await < orders {} };
    tokio::time::timeout(PATIENCE, booked).await.expect("every order gets its invoice");
    again.signal(Signal::TERM);
    assert_eq!(tokio::task::spawn_blocking(move || again.end()).await.unwrap(), (true, "stopped".into()));
    assert_eq!(number(&database_client, "select count(*) from invoice").await, orders);
    assert_eq!(number(&database_client, "select count(distinct order_id) from invoice").await, orders, "one each");
}

#[tokio::test(flavor = "multi_thread")]
async fn told_to_stop_it_answers_what_it_has_begun_and_drains() {
    check(Signal::TERM, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_it_books_every_order_once_after_the_next_start() {
    check(Signal::KILL, false).await;
}
