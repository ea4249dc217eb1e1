//! What only PostgreSQL has: servers, roles, passwords, certificates, copies made by the server.

use std::net::TcpListener;
use std::process::Command;

use pillarbox_testkit::postgres::Server;

use crate::place::{On, Place, stderr, stdout};

const SECRET: &str = "canary";

/// Runs it with this database; its exit code and all that it said, which must not be the password.
fn run(place: &Place, url: &str, args: &[&str]) -> (Option<i32>, String) {
    said(place.bare(args).env("DATABASE_URL", url).env("RUST_BACKTRACE", "1"))
}

fn said(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let text = format!("{}{}", stdout(&output), stderr(&output));
    assert!(!text.contains(SECRET), "{command:?}: {text}");
    (output.status.code(), text)
}

#[track_caller]
fn check(place: &Place, url: &str, code: i32, parts: &[&str]) {
    for args in
        [&["status"][..], &["-vv", "run", "--stdout", "--until-idle"], &["migrate"], &["doctor"], &["tail"], &["demo"]]
    {
        let with_flag = [args, &["--database", url]].concat();
        let (found, text) = run(place, url, if args == ["demo"] { &with_flag } else { args });
        assert_eq!(found, Some(code), "{args:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{args:?}: '{part}' is not in: {text}");
        }
        let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{text}");
    }
}

#[test]
fn nobody_listens() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let place = Place::at("");
    let url = format!("postgres://app:{SECRET}@127.0.0.1:{port}/app");
    check(&place, &url, 1, &[&format!("postgres://127.0.0.1:{port}/app"), "refused", "check that the server runs"]);
}

#[test]
fn there_is_no_such_database() {
    let server = Server::shared();
    let url = server.url("nowhere").replace("//postgres@", &format!("//postgres:{SECRET}@"));
    check(&Place::at(""), &url, 1, &["\"nowhere\" does not exist", "createdb"]);
}

#[test]
fn a_wrong_password_and_a_right_one() {
    let server = Server::builder().tls().start().unwrap();
    let place = Place::on(&server);
    let database = place.url().rsplit('/').next().unwrap().to_owned();
    let hba = server.data_dir().join("pg_hba.conf");
    let rules = std::fs::read_to_string(&hba).unwrap();
    std::fs::write(&hba, format!("host all app 127.0.0.1/32 scram-sha-256\n{rules}")).unwrap();
    let sql = format!(
        "create role app login password 'right-{SECRET}'; grant create on database {database} to app; \
         select pg_reload_conf()"
    );
    server.psql("postgres", &sql).unwrap();
    let url = |password: &str| server.url_as(&format!("app:{password}{SECRET}"), &database);
    crate::ledger::until("the server asks for passwords", || {
        run(&place, &url("wrong-"), &["status"]).1.contains("password")
    });
    check(
        &place,
        &url("wrong-"),
        1,
        &["password authentication failed", "check the user and the password", "pg_hba.conf"],
    );

    let url = url("right-");
    let all = [
        &["migrate", "--check"][..],
        &["migrate"],
        &["-vv", "publish", "--topic", "t", "--type", "y"],
        &["-vv", "run", "--stdout", "--until-idle"],
        &["status"],
        &["reset"],
        &["config", "print"],
        &["config", "print", "--json"],
        &["demo", "--seconds", "1", "--database", &url],
    ];
    let codes: Vec<Option<i32>> = all.iter().map(|args| run(&place, &url, args).0).collect();
    assert_eq!(codes, [3, 0, 0, 0, 0, 2, 0, 0, 0].map(Some));
    assert!(run(&place, &url, &["config", "print"]).1.contains("postgres://app:***@127.0.0.1"));
    let (_, text) = run(&place, &url, &["-vv", "run", "--stdout", "--until-idle"]);
    let first = text.lines().find(|line| !line.starts_with('{')).unwrap();
    assert!(first.contains(&format!("postgres://127.0.0.1:{}/{database}", server.port())), "{text}");
}

#[test]
fn every_check_of_a_certificate() {
    let server = Server::builder().tls().start().unwrap();
    let place = Place::on(&server);
    let database = place.url().rsplit('/').next().unwrap().to_owned();
    let place = place.with_url(|_| server.tls_url(&database)).migrated().file_sink();
    let id = place.publish(&[]);
    place.ok(&["run", "--until-idle"]);
    assert!(place.read("out.ndjson").contains(&id));
    place.ok(&["demo", "--seconds", "1", "--database", place.url()]);
    let unencrypted = "select count(*) from pg_stat_ssl join pg_stat_activity using (pid) \
                       where application_name like 'pillarbox%' and not ssl";
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    assert_eq!(server.psql(&database, unencrypted).unwrap(), "0");

    let other = Server::builder().tls().start().unwrap();
    let wrong_name = place.url().replace("localhost", "127.0.0.1");
    let authority = |server: &Server| server.authority().display().to_string();
    let wrong_authority = place.url().replace(&authority(&server), &authority(&other));
    for url in [&wrong_name, &wrong_authority] {
        let (code, text) = run(&place, url, &["status"]);
        assert!(code == Some(1) && text.contains("certificate"), "{text}");
    }
    // As libpq does: an authority that is named is looked at, the name of the server is not.
    let require = |url: &str| url.replace("verify-full", "require");
    assert_eq!(run(&place, &require(&wrong_name), &["status"]).0, Some(0));
    let (code, text) = run(&place, &require(&wrong_authority), &["status"]);
    assert!(code == Some(1) && text.contains("certificate"), "{text}");
    let (code, text) =
        run(&place, &format!("{}?sslmode=require&sslrootcert=system", server.url(&database)), &["status"]);
    assert!(code == Some(2) && text.contains("sslmode=verify-full"), "{text}");
}

#[test]
fn what_a_url_leaves_out_comes_from_where_libpq_takes_it() {
    let server = Server::builder().start().unwrap();
    let place = Place::on(&server).migrated();
    let database = place.url().rsplit('/').next().unwrap().to_owned();
    let hba = server.data_dir().join("pg_hba.conf");
    let rules = std::fs::read_to_string(&hba).unwrap();
    std::fs::write(&hba, format!("host all app 127.0.0.1/32 scram-sha-256\n{rules}")).unwrap();
    let sql = format!("create role app superuser login password 'right-{SECRET}'; select pg_reload_conf()");
    server.psql("postgres", &sql).unwrap();
    let (port, home) = (server.port().to_string(), place.path(""));
    let password = format!("right-{SECRET}");
    let url = format!("postgres:///{database}");
    let status = |url: &str, more: &[(&str, &str)]| {
        let place_of = [("HOME", home.to_str().unwrap()), ("DATABASE_URL", url)];
        said(place.bare(&["status"]).envs(place_of).envs(more.iter().copied()))
    };
    let app = [("PGHOST", "127.0.0.1"), ("PGPORT", port.as_str()), ("PGUSER", "app")];
    crate::ledger::until("the server asks for passwords", || status(&url, &app).0 == Some(1));
    assert_eq!(status(&url, &[&app[..], &[("PGPASSWORD", &password)]].concat()).0, Some(0));
    assert_eq!(
        status("postgres://", &[&app[..], &[("PGPASSWORD", &password), ("PGDATABASE", &database)]].concat()).0,
        Some(0)
    );
    let (_, text) = status(&url, &[&app[..], &[("PGPASSWORD", "wrong")]].concat());
    assert!(text.contains(&format!("postgres://127.0.0.1:{port}/{database}")), "{text}");
    let socket = server.socket_dir().to_str().unwrap();
    assert_eq!(status(&url, &[("PGHOST", socket), ("PGPORT", &port), ("PGUSER", "postgres")]).0, Some(0));

    place.write(".pgpass", &format!("127.0.0.1:{port}:*:app:{password}\n"));
    set_mode(&place, ".pgpass", 0o644);
    let (code, text) = status(&url, &app);
    assert!(code == Some(1) && text.contains("chmod 0600"), "{text}");
    set_mode(&place, ".pgpass", 0o600);
    assert_eq!(status(&url, &app).0, Some(0));

    place.write(".pg_service.conf", &format!("[shop]\nhost=127.0.0.1\nport={port}\nuser=app\ndbname={database}\n"));
    assert_eq!(status("postgres://?service=shop", &[("PGUSER", "nobody")]).0, Some(0));
    assert_eq!(status("postgres://", &[("PGSERVICE", "shop")]).0, Some(0));
    let (code, text) = status("postgres://", &[("PGSERVICE", "none")]);
    assert!(code == Some(2) && text.contains("no service 'none'"), "{text}");
}

fn set_mode(place: &Place, name: &str, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(place.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
}

/// It would be taken for a host, and hosts are printed.
#[test]
fn no_part_of_a_password_with_an_at_sign_is_printed() {
    let place = Place::at("");
    for url in [format!("postgres://u:top@{SECRET}@localhost:1/app"), format!("postgres://u:to@p/{SECRET}@h:1/app")] {
        for args in [&["run", "--stdout", "--until-idle"][..], &["status"], &["doctor"], &["config", "check"]] {
            let (code, text) = run(&place, &url, args);
            assert!(text.contains("%40"), "{args:?} {code:?}: {text}");
        }
    }
    let sinks = [
        format!("{{ kind = \"postgres\", url = \"postgres://u:top@{SECRET}@localhost:1/app\", table = \"t\" }}"),
        format!("{{ kind = \"redis_stream\", url = \"redis://u:top@{SECRET}@localhost:1/0\", stream = \"t\" }}"),
        format!("{{ kind = \"http\", url = \"http://u:top@{SECRET}@localhost:1/\" }}"),
    ];
    let place = Place::new(On::Sqlite);
    for sink in sinks {
        place.write("pillarbox.toml", &format!("[[subscription]]\nname = \"s\"\nsink = {sink}\n"));
        place.publish(&[]);
        for args in [&["run", "--until-idle"][..], &["doctor"], &["config", "check"], &["config", "print"]] {
            said(&mut place.command(args));
        }
    }
}

#[test]
fn a_role_without_grants_is_told_where_they_are() {
    let server = Server::shared();
    let place = Place::new(On::Postgres);
    let database = place.url().rsplit('/').next().unwrap().to_owned();
    let role = format!("nobody_{database}");
    server.psql("postgres", &format!("create role {role} login")).unwrap();
    let (code, text) = run(&place, &server.url_as(&role, &database), &["status"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains(&role) && text.contains("migrate --print-roles"), "{text}");
    server.psql("postgres", &format!("drop role {role}")).unwrap();
}

#[test]
fn a_missing_schema_is_3_and_names_the_command() {
    let place = Place::empty(On::Postgres);
    let url = place.url().replace("//postgres@", &format!("//postgres:{SECRET}@")) + "?schema=other";
    for args in [
        &["status"][..],
        &["run", "--stdout"],
        &["publish", "--topic", "t", "--type", "y"],
        &["tail"],
        &["migrate", "--check"],
    ] {
        let (code, text) = run(&place, &url, args);
        assert_eq!(code, Some(3), "{args:?}: {text}");
        let command = format!("pillarbox migrate --database '{}'", url.replace(SECRET, "***"));
        assert!(text.contains(&command), "{args:?}: {text}");
    }
}

#[test]
fn a_copy_is_refused_until_it_is_declared() {
    let server = Server::shared();
    let place = Place::with_file_sink(On::Postgres);
    let old = place.publish(&[]);
    let database = place.url().rsplit('/').next().unwrap().to_owned();
    for name in ["fresh", "adopted"] {
        server.psql("postgres", &format!("create database {database}_{name} template {database}")).unwrap();
    }
    let url = |name: &str| server.url(&format!("{database}_{name}"));
    let (fresh, adopted) = (url("fresh"), url("adopted"));
    let on = |url: &str, args: &[&str]| place.ok(&[args, &["--database", url]].concat());
    let text = place.fails(3, &["run", "--until-idle", "--database", &fresh]);
    assert!(text.contains("--adopt") && text.contains("--fresh"), "{text}");
    assert!(!place.path("out.ndjson").exists(), "a copy delivered");

    on(&fresh, &["migrate", "--fresh"]);
    on(&fresh, &["run", "--until-idle"]);
    assert!(!place.path("out.ndjson").exists(), "a fresh copy delivered what is old");
    let new = place.publish(&["--database", &fresh]);
    on(&fresh, &["rewind", "out", "--to", "start", "--yes"]);
    on(&fresh, &["run", "--until-idle"]);
    let text = place.read("out.ndjson");
    assert!(text.contains(&new) && !text.contains(&old), "a fresh copy delivered {text}");

    on(&adopted, &["migrate", "--adopt"]);
    on(&adopted, &["run", "--until-idle"]);
    assert!(place.read("out.ndjson").contains(&old));
    for name in ["fresh", "adopted"] {
        server.psql("postgres", &format!("drop database {database}_{name} with (force)")).unwrap();
    }
}

#[test]
fn two_logs_in_two_schemas_of_a_database_do_not_meet() {
    let place = Place::with_file_sink(On::Postgres);
    let other = format!("{}?schema=other", place.url());
    place.ok(&["migrate", "--database", &other]);
    let id = place.publish(&["--database", &other]);
    place.ok(&["run", "--until-idle"]);
    assert!(!place.path("out.ndjson").exists());
    assert_eq!(place.json(&["status"])["log"]["events"], 0);
    place.ok(&["run", "--until-idle", "--database", &other]);
    assert!(place.read("out.ndjson").contains(&id));
}

#[test]
fn a_role_that_may_only_publish_publishes() {
    let server = Server::shared();
    let place = Place::new(On::Postgres);
    let database = place.url().rsplit('/').next().unwrap().to_owned();
    let role = format!("shop_{database}");
    let grants = place.ok(&["migrate", "--print-roles"]).replace("pillarbox_publisher", &role);
    // The other roles may be there from another test.
    let mine: Vec<&str> = grants.split_inclusive(';').filter(|statement| statement.contains(&role)).collect();
    let mine = mine.concat().replace(&format!("{role}, pillarbox_relay, pillarbox_viewer, pillarbox_journal"), &role);
    server.psql(&database, &format!("{mine}; alter role {role} login")).unwrap();
    let url = server.url_as(&role, &database);
    let publish = ["publish", "--topic", "t", "--type", "y", "--dedup-key", "d", "--database", &url];
    let id = place.ok(&publish);
    assert_eq!(place.ok(&publish), id);
    assert!(place.ok(&["run", "--stdout", "--until-idle"]).contains(id.trim()));
    let (code, text) = run(&place, &url, &["status"]);
    assert!(code == Some(1) && text.contains("migrate --print-roles"), "{text}");
    server.psql(&database, &format!("drop owned by {role}; drop role {role}")).unwrap();
}

#[test]
fn doctor_shows_what_every_other_command_refuses() {
    let place = Place::new(On::Postgres);
    place.sql().execute("alter sequence pillarbox_event_position_seq cache 10");
    assert!(place.fails(1, &["status"]).contains("cache is 10"));
    let (code, text) = run(&place, place.url(), &["doctor"]);
    assert_eq!(code, Some(1), "{text}");
    let fix = "fix: run `alter sequence pillarbox.event_position_seq cache 1";
    assert!(text.contains("failed   sequence: cache is 10") && text.contains(fix), "{text}");
    assert!(text.contains("ok       home:"), "the rest is looked at too: {text}");
    place.sql().execute("drop schema pillarbox cascade");
    let (code, text) = run(&place, place.url(), &["doctor"]);
    assert!(code == Some(3) && text.contains("pillarbox migrate"), "{text}");
}

#[test]
fn prune_ends_the_table_in_use_so_that_it_can_be_emptied() {
    let place = Place::with_file_sink(On::Postgres);
    (0..3).for_each(|_| drop(place.publish(&[])));
    place.ok(&["run", "--until-idle"]);
    let sql = place.sql();
    sql.execute(
        "alter table pillarbox_event disable trigger is_never_changed; \
         update pillarbox_event set id = coalesce(id, pillarbox_event_id(position, created_at)), \
             created_at = created_at - interval '10 days'",
    );
    sql.execute("begin; insert into pillarbox_event (topic, type) values ('t', 'y')");
    let output = place.command(&["prune", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("the leaves could not be laid"), "{}", stderr(&output));
    let pruned: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&pruned["events"], &pruned["in_use"]), (&0.into(), &3.into()), "{pruned}");
    sql.execute("rollback");
    place.ok(&["run", "--until-idle"]);
    // A relay would have done it by itself, had nobody been in the way.
    assert_eq!(place.json(&["prune"])["events"], 3);

    // Its end is not due for these: what is kept for a moment only goes with the table all the same.
    (0..2).for_each(|_| drop(place.publish(&[])));
    place.ok(&["run", "--until-idle"]);
    let dry = place.json(&["prune", "--keep", "0ms", "--dry-run"]);
    assert_eq!((&dry["events"], &dry["in_use"]), (&0.into(), &2.into()), "{dry}");
    let output = place.command(&["prune", "--keep", "0ms"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("removed 0 events"), "{}", stdout(&output));
    let stay = "2 old events stay in the table in use, since events go table by table";
    assert!(stderr(&output).contains(stay), "{}", stderr(&output));
}

#[test]
fn fresh_on_the_log_itself_is_refused_beside_a_journal_too() {
    let place = Place::with_file_sink(On::Postgres);
    let sql = place.sql();
    sql.execute("select pillarbox_append('stream', 0, '[{\"type\": \"y\"}]')");
    (0..3).for_each(|_| drop(place.publish(&[])));
    place.ok(&["run", "--until-idle"]);
    assert!(sql.number("select count(*) from pillarbox_cursor where anchor_position > 1") > 0);
    // As retention leaves it that went around the journal.
    sql.execute(
        "alter table pillarbox_event disable trigger is_never_changed; delete from pillarbox_event where position > 1; \
         update pillarbox_meta set pruned_to = 4",
    );
    let text = place.fails(2, &["migrate", "--fresh"]);
    assert!(text.contains("--fresh --yes"), "{text}");
}

#[test]
fn a_refusal_is_told_with_what_resolves_it() {
    let server = Server::shared();
    let place = Place::empty(On::Postgres);
    let database = place.url().rsplit('/').next().unwrap().to_owned();
    let role = format!("refused_{database}");
    server.psql("postgres", &format!("create role {role} login")).unwrap();
    let url = server.url_as(&role, &database);
    let (code, text) = run(&place, &url, &["migrate"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("grant create on database") && !text.contains("--print-roles"), "{text}");

    let place = place.migrated();
    let grants = [
        "usage on schema",
        "select on all tables in schema",
        "select on all sequences in schema",
        "execute on all functions in schema",
    ];
    let grants: String = grants.iter().map(|what| format!("grant {what} pillarbox to {role};")).collect();
    server.psql(&database, &grants).unwrap();
    let (code, text) = run(&place, &url, &["reset", "--yes"]);
    assert!(code == Some(1) && text.contains("owns the schema") && !text.contains("--print-roles"), "{text}");

    server.psql(&database, &format!("alter role {role} set default_transaction_read_only = on")).unwrap();
    let (code, text) = run(&place, &url, &["publish", "--topic", "t", "--type", "y"]);
    assert!(code == Some(1) && text.contains("default_transaction_read_only"), "{text}");
    assert!(!text.contains("not reachable"), "{text}");
    server.psql(&database, &format!("drop owned by {role}; drop role {role}")).unwrap();
}

/// Any role that may connect can hold any advisory lock.
#[test]
fn a_number_whose_lock_somebody_holds_is_passed_over() {
    let place = Place::with_file_sink(On::Postgres);
    place.ok(&["run", "--until-idle"]);
    let sql = place.sql();
    let used = sql.number("select last_value from pillarbox.instance_id_seq");
    // The class is known from a relay that runs.
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let class = sql.number("select max(classid::bigint) from pg_locks where locktype = 'advisory' and objsubid = 2 and database = (select oid from pg_database where datname = current_database())");
    for number in used + 2..used + 5 {
        sql.execute(&format!("select pg_advisory_lock({class}::int, {number}::int)"));
    }
    let id = place.publish(&[]);
    let output = place.command(&["run", "--until-idle"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("taking the next one"), "{}", stderr(&output));
    crate::ledger::until("it is delivered", || place.read("out.ndjson").contains(&id));
}
