use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pillarbox_testkit::postgres::{Mode, Server, connect};

/// Set in the copy of this test binary that is killed.
const VICTIM_VARIABLE: &str = "PILLARBOX_TEST_VICTIM";

/// How long what was left by a killed process may take to go.
const GONE_TIMEOUT: Duration = Duration::from_secs(30);

/// What the cluster says it is.
const IDENTIFIER: &str = "select system_identifier from pg_control_system()";

#[tokio::test]
async fn each_test_has_a_database_of_its_own_on_the_shared_server() {
    let (first, second) = (Server::shared().create_database().unwrap(), Server::shared().create_database().unwrap());
    first.psql("create table only_here ()").unwrap();
    let client = connect(second.url()).await.unwrap();
    let row = client.query_one("select to_regclass('only_here') is null, current_database()", &[]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), (true, second.name()));
}

#[test]
fn a_database_goes_with_its_value_although_a_transaction_was_prepared_in_it() {
    let database = Server::shared().create_database().unwrap();
    database.psql("create table t (); begin; insert into t default values; prepare transaction 'it''s'").unwrap();
    let name = database.name().to_owned();
    drop(database);
    let left = format!(
        "select (select count(*) from pg_database where datname = '{name}'),
                (select count(*) from pg_prepared_xacts where database = '{name}')"
    );
    assert_eq!(Server::shared().psql("postgres", &left).unwrap(), "0|0");
}

#[test]
fn a_server_comes_back_on_its_port_with_what_was_committed() {
    let server = Server::builder().start().unwrap();
    let port = server.port();
    server.psql("postgres", "create table kept (n int); insert into kept values (1)").unwrap();
    server.restart(Mode::Immediate).unwrap();
    assert!(server.log().contains("automatic recovery in progress"), "{}", server.log());
    server.psql("postgres", "insert into kept values (2)").unwrap();
    server.stop(Mode::Fast).unwrap();
    server.psql("postgres", "select 1").unwrap_err();
    server.start().unwrap();
    assert_eq!(server.port(), port);
    assert_eq!(server.psql("postgres", "select n from kept order by n").unwrap(), "1\n2");
}

#[test]
fn every_server_has_an_identity_and_a_copy_has_that_of_its_original() {
    let server = Server::builder().start().unwrap();
    server.psql("postgres", "create table kept (n int); insert into kept values (1)").unwrap();
    let backup = server.backup().unwrap();
    server.psql("postgres", "insert into kept values (2)").unwrap();
    let copy = backup.start().unwrap();
    assert_eq!(copy.psql("postgres", "select n from kept").unwrap(), "1");
    copy.psql("postgres", "insert into kept values (3)").unwrap();
    let identifier = server.psql("postgres", IDENTIFIER).unwrap();
    assert_eq!(copy.psql("postgres", IDENTIFIER).unwrap(), identifier);
    assert_ne!(Server::shared().psql("postgres", IDENTIFIER).unwrap(), identifier);
    server.restore_backup(&backup).unwrap();
    assert_eq!(server.psql("postgres", "select n from kept").unwrap(), "1");
}

#[test]
fn a_standby_follows_and_can_be_promoted() {
    let primary = Server::builder().start().unwrap();
    let standby = primary.standby().unwrap();
    primary.psql("postgres", "create table followed (n int); insert into followed values (1)").unwrap();
    standby.wait_until_replayed(&primary).unwrap();
    assert_eq!(standby.psql("postgres", "select n, pg_is_in_recovery() from followed").unwrap(), "1|t");
    standby.psql("postgres", "insert into followed values (2)").unwrap_err();
    primary.stop(Mode::Immediate).unwrap();
    standby.promote().unwrap();
    standby.psql("postgres", "insert into followed values (2)").unwrap();
}

#[test]
fn a_dump_can_be_restored_into_another_database() {
    let server = Server::builder().with_dump().start().unwrap();
    let (from, to) = (server.create_database().unwrap(), server.create_database().unwrap());
    from.psql("create table kept (n int); insert into kept values (7)").unwrap();
    let dump = server.dump(from.name()).unwrap();
    server.restore(to.name(), &dump).unwrap();
    assert_eq!(to.psql("select n from kept").unwrap(), "7");
    server.restore(to.name(), &dump).unwrap_err();
}

#[test]
fn the_certificate_is_for_localhost_and_of_the_authority() {
    let server = Server::builder().tls().start().unwrap();
    let check = |name: &str, authority: &Path| {
        let address = format!("127.0.0.1:{}", server.port());
        let mut command = Command::new("openssl");
        command.args(["s_client", "-starttls", "postgres", "-verify_return_error", "-connect", &address]);
        command.args(["-verify_hostname", name, "-CAfile"]).arg(authority).stdin(Stdio::null());
        command.output().unwrap().status.success()
    };
    let other = Server::builder().tls().start().unwrap();
    assert!(check("localhost", &server.authority()));
    assert!(!check("127.0.0.1", &server.authority()));
    assert!(!check("localhost", &other.authority()));
}

#[test]
fn settings_reach_the_server() {
    let server = Server::builder().durable().setting("max_prepared_transactions", 7).start().unwrap();
    let settings = "select current_setting('fsync'), current_setting('max_prepared_transactions')";
    assert_eq!(server.psql("postgres", settings).unwrap(), "on|7");
}

#[tokio::test]
async fn pgbouncer_shares_the_sessions_of_the_server() {
    let database = Server::shared().create_database().unwrap();
    let bouncer = Server::shared().bouncer(&[("pool_mode", "transaction"), ("default_pool_size", "1")]).unwrap();
    let url = bouncer.url(database.name());
    let (first, second) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    let mut sessions = Vec::new();
    for client in [first, second] {
        // Not prepared: a statement would be unknown to the next session.
        let row = client.query_typed_one("select pg_backend_pid()", &[]).await.unwrap();
        sessions.push(row.get::<_, i32>(0));
    }
    assert_eq!(sessions[0], sessions[1]);
}

#[test]
fn a_dropped_server_leaves_nothing() {
    let server = Server::builder().start().unwrap();
    let folder = server.socket_dir().to_owned();
    let pid = postmaster(&folder);
    drop(server);
    assert!(!folder.exists());
    assert!(!Path::new("/proc").join(pid).exists());
}

#[test]
fn a_killed_test_process_leaves_nothing() {
    if std::env::var_os(VICTIM_VARIABLE).is_some() {
        let server = Server::builder().start().unwrap();
        println!("\nfolder={}", server.socket_dir().display());
        std::thread::park();
    }
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "postgres::a_killed_test_process_leaves_nothing", "--nocapture"])
        .env(VICTIM_VARIABLE, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let printed = std::io::BufRead::lines(std::io::BufReader::new(victim.stdout.take().unwrap()));
    let folder = printed.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("folder=")?.to_owned()));
    let folder = folder.unwrap();
    let pid = postmaster(Path::new(&folder));
    victim.kill().unwrap();
    victim.wait().unwrap();
    let given_up = Instant::now() + GONE_TIMEOUT;
    while Path::new(&folder).exists() || is_running(&pid) {
        assert!(Instant::now() < given_up, "the server of a killed process is still there");
        std::thread::yield_now();
    }
}

fn postmaster(folder: &Path) -> String {
    let file = std::fs::read_to_string(folder.join("data/postmaster.pid")).unwrap();
    file.lines().next().unwrap().to_owned()
}

/// A process that has ended but was not waited for by its new parent does not run.
fn is_running(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}
