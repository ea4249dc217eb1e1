use crate::place::{On, Place, stderr, stdout};

#[test]
fn an_unknown_key_stops_run_with_its_neighbour() {
    let place = Place::new(On::Sqlite);
    place.write("pillarbox.toml", "[relay]\nbatchsize = 5\n");
    for args in [&["run", "--until-idle"][..], &["config", "print"]] {
        let text = place.fails(1, args);
        assert!(text.contains("line 2") && text.contains("did you mean `batch_size`?"), "{text}");
    }
}

#[test]
fn check_lists_every_problem() {
    let place = Place::new(On::Sqlite);
    place.write(
        "pillarbox.toml",
        "[relay]\nwokers = 5\n[[subscription]]\nname = \"k\"\nsink = { kind = \"nats\", url = \"nats://h\", subject = \"s\" }\n",
    );
    let output = place.command(&["config", "check"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains("did you mean `workers`?"), "{text}");
    assert!(text.contains("subscription 'k'.sink: sink kind 'nats' is not in this version"), "{text}");
    let text = place.fails(1, &["run", "--until-idle"]);
    assert!(text.contains("nats"), "{text}");
    place.write("pillarbox.toml", "");
    assert_eq!(place.json(&["config", "check"])["ok"], true);
}

#[test]
fn check_tells_what_run_would_still_lack() {
    let place = Place::new(On::Sqlite);
    let check = |command: &mut std::process::Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output)
    };
    let text = check(&mut place.bare(&["config", "check"]));
    assert!(text.starts_with("no config file: 0 subscriptions, no problems\n"), "{text}");
    let needs = "`pillarbox run` needs one, by --database URL, by DATABASE_URL or by `database = \"URL\"` in the file";
    assert!(
        text.contains("neither the file nor the environment names a database here") && text.contains(needs),
        "{text}"
    );
    let text = check(&mut place.bare(&["config", "check", "--database", "mysql://h/d"]));
    assert!(text.contains("`pillarbox run` needs a database: ") && !text.contains("neither"), "{text}");
    assert!(text.contains("`pillarbox run` refuses to start"), "{text}");
    let text = check(&mut place.command(&["config", "check"]));
    assert!(!text.contains("database") && text.contains("prints all events"), "{text}");
    let sink = "sink = { kind = \"stdout\" }";
    place.write("pillarbox.toml", &format!("database = \"sqlite:app.db\"\n[[subscription]]\nname = \"a\"\n{sink}\n"));
    assert_eq!(check(&mut place.bare(&["config", "check"])), "pillarbox.toml: 1 subscription, no problems\n");
}

#[test]
fn who_finds_no_database_is_told_of_the_misspelt_one() {
    let place = Place::new(On::Sqlite);
    for (config, problem) in [
        ("databse = \"sqlite:app.db\"\n", "line 1: databse: unknown key `databse`; did you mean `database`?"),
        ("[relay]\ndatabase = \"sqlite:app.db\"\n", "line 2: relay.database: unknown key `database`"),
    ] {
        place.write("pillarbox.toml", config);
        for args in [&["run", "--until-idle"][..], &["status"], &["publish", "--topic", "t", "--type", "x"]] {
            let output = place.bare(args).output().unwrap();
            let text = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
            assert!(text.contains("no database was given") && text.contains(problem), "{args:?}: {text}");
        }
    }
}

#[test]
fn a_database_that_is_not_there_is_named_by_its_whole_path() {
    let place = Place::new(On::Sqlite);
    let output = place.bare(&["status", "--database", "sqlite:nowhere/app.db"]).output().unwrap();
    let (text, path) = (stderr(&output), place.path("nowhere/app.db"));
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(path.is_absolute() && text.contains(&format!("there is no database at {};", path.display())), "{text}");
    assert!(text.contains("`pillarbox migrate --database sqlite:nowhere/app.db`"), "{text}");
}

#[test]
fn print_shows_what_is_in_force_without_secrets() {
    let place = Place::new(On::Sqlite);
    place.write("token", "hidden\n");
    place.write("pillarbox.toml", "[http]\ntokens = [{ file = \"token\" }]\n[relay]\nworkers = 2\n");
    let output = place.command(&["config", "print"]).env("PILLARBOX__RELAY__WORKERS", "9").output().unwrap();
    let text = stdout(&output);
    assert!(text.contains("workers = 9") && !text.contains("hidden"), "{text}{}", stderr(&output));
    let printed: toml::Value = toml::from_str(&text).unwrap();
    assert_eq!(printed["database"].as_str(), Some("sqlite:app.db"));
    assert_eq!(place.json(&["config", "print"])["relay"]["workers"], 2);
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let place = Place::new(On::Sqlite);
    place.write("pillarbox.toml", "database = \"sqlite:file.db\"\n");
    let shown = |command: &mut std::process::Command| stdout(&command.output().unwrap());
    assert!(shown(&mut place.bare(&["config", "print"])).contains("sqlite:file.db"));
    assert!(shown(&mut place.command(&["config", "print"])).contains("sqlite:app.db"));
    assert!(shown(&mut place.command(&["config", "print", "--database", "sqlite:flag.db"])).contains("sqlite:flag.db"));
}

#[test]
fn a_named_config_that_is_not_there_is_wrong_usage() {
    let text = Place::new(On::Sqlite).fails(2, &["run", "--config", "nowhere.toml"]);
    assert!(text.contains("nowhere.toml"), "{text}");
}

#[test]
fn doctor_tells_what_it_found_although_the_config_cannot_be_read() {
    let place = Place::new(On::Sqlite);
    let output = place.command(&["doctor", "--config", "nowhere.toml"]).output().unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}{}", stderr(&output));
    assert!(text.contains("schema: "), "{text}");
    assert!(text.contains("failed   config: cannot read the config file nowhere.toml"), "{text}");
    let output = place.command(&["doctor", "--json", "--config", "nowhere.toml"]).output().unwrap();
    let checks: Vec<serde_json::Value> = serde_json::from_str(&stdout(&output)).unwrap();
    assert!(checks.len() > 1 && checks.iter().any(|check| check["name"] == "config"), "{checks:?}");
}

#[test]
fn operators_are_not_kept_from_the_log_by_what_does_not_concern_them() {
    let place = Place::with_file_sink(On::Sqlite);
    place.ok(&["run", "--until-idle"]);
    place.write("url", "sqlite:app.db\n");
    let broken = "[relay]\nwokers = 5\n[[subscription]]\nname = \"k\"\nsink = { kind = \"kafka\" }\n";
    let run = |args: &[&str]| {
        let output = place.bare(args).env("HERE", "sqlite:app.db").output().unwrap();
        (output.status.code(), format!("{}{}", stdout(&output), stderr(&output)))
    };
    for database in ["\"sqlite:app.db\"", "{ env = \"HERE\" }", "{ file = \"url\" }"] {
        place.write("pillarbox.toml", &format!("database = {database}\n{broken}"));
        for args in [&["status"][..], &["list"], &["audit"], &["prune"], &["pause", "out"], &["migrate"]] {
            let (code, text) = run(args);
            assert_eq!(code, Some(0), "{database}: {args:?}: {text}");
        }
        for args in [&["run", "--until-idle"][..], &["config", "check"], &["doctor"]] {
            let (code, text) = run(args);
            assert!(code == Some(1) && text.contains("did you mean `workers`?"), "{args:?}: {text}");
        }
    }
    let (_, text) = run(&["doctor"]);
    assert!(text.contains("schema: ") && text.contains("failed   config: line 3: relay.wokers"), "{text}");
    place.write("pillarbox.toml", "database = { env = \"NOT_SET\" }\n");
    assert!(matches!(run(&["status"]), (Some(1), text) if text.contains("NOT_SET is not set")));
    place.write("pillarbox.toml", "database = \"sqlite:app.db\n[relay]\n");
    assert!(matches!(run(&["status"]), (Some(1), text) if text.contains("line 1")));
}

#[test]
fn prune_stops_at_a_misspelt_retention() {
    let place = Place::with_file_sink(On::Sqlite);
    for (config, part) in [
        ("[retenton]\nkeep = \"forever\"\n", "did you mean `retention`?"),
        ("[retention]\nkep = \"forever\"\n", "did you mean `keep`?"),
        ("[dedup]\nwindow = \"soon\"\n", "'soon' is not a duration"),
    ] {
        place.write("pillarbox.toml", config);
        let text = place.fails(1, &["prune"]);
        assert!(text.contains(part), "{text}");
    }
}

/// A password in every place where somebody may write one; it must come out nowhere.
#[test]
fn a_password_is_never_printed() {
    const SECRET: &str = "canary";
    let place = Place::new(On::Sqlite);
    let check = |command: &mut std::process::Command| {
        let output = command.output().unwrap();
        let text = format!("{}{}", stdout(&output), stderr(&output));
        assert!(!text.contains(SECRET), "{command:?}: {text}");
        assert!(!text.is_empty(), "{command:?} says nothing");
    };
    let urls = [
        "postgres://u:canary@h/d",
        "postgres://u:can/canary@h/d",
        "postgres://h/d?user=u&password=canary",
        "postgresql:host=h password=canary",
        "host=h password=canary",
        "host=h password = 'x canary'",
        "mysql://u:canary@h/d",
        "mysql://h/canary",
        "u:canary@h",
        "canary",
        "sqlite://u:canary@h/app.db",
        "sqlite:app.db?key=canary",
    ];
    for url in urls {
        for args in
            [&["status"][..], &["-vv", "run", "--until-idle"], &["migrate"], &["reset", "--yes"], &["config", "print"]]
        {
            check(place.bare(args).args(["--database", url]));
            check(place.bare(args).env("DATABASE_URL", url));
            check(place.bare(args).env("PILLARBOX__DATABASE", url));
        }
        place.write("secret", url);
        place.write("quoted.toml", &format!("database = \"{url}\"\n"));
        place.write("file.toml", "database = { file = \"secret\" }\nhttp = { listen = { file = \"secret\" } }\n");
        for file in ["quoted.toml", "file.toml"] {
            for args in [
                &["status"][..],
                &["-vv", "run", "--until-idle"],
                &["config", "print"],
                &["config", "check"],
                &["config", "print", "--json"],
            ] {
                check(place.bare(args).args(["--config", file]));
            }
        }
    }
    let urls = ["postgres://u:canary@h/d", "--databas=postgres://u:canary@h/d"];
    for misplaced in [&urls[..1], &["status", urls[0]], &["status", urls[1]], &["list", "--state", urls[0]]] {
        check(&mut place.bare(misplaced));
    }
    let sink = "sink = { kind = \"stdout\", source = \"https://u:canary@h/?token=canary\" }";
    let text = format!("[http]\ntokens = [\"canary\"]\n[[subscription]]\nname = \"a\"\n{sink}\n");
    place.write("pillarbox.toml", &text);
    check(&mut place.command(&["config", "print"]));
    check(&mut place.command(&["-vv", "run", "--until-idle"]));
}

/// Lines in the middle of a database destroy it.
#[test]
fn a_file_sink_into_the_database_itself_is_refused() {
    let place = Place::new(On::Sqlite);
    std::fs::create_dir(place.path("sub")).unwrap();
    for path in ["app.db", "./sub/../app.db", "app.db-wal", "app.db-pillarbox/out"] {
        let sink = format!("{{ kind = \"file\", path = \"{path}\" }}");
        for sink in [sink.clone(), format!("{{ kind = \"chain\", sinks = [{sink}] }}")] {
            place.write("pillarbox.toml", &format!("[[subscription]]\nname = \"out\"\nsink = {sink}\n"));
            let said = [
                place.fails(1, &["run", "--until-idle"]),
                stdout(&place.command(&["config", "check"]).output().unwrap()),
                stdout(&place.command(&["doctor"]).output().unwrap()),
            ];
            for text in said {
                assert!(text.contains("'out'") && text.contains("into the database itself"), "{path}: {text}");
            }
        }
    }
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\nsink = { kind = \"file\", path = \"app.db.ndjson\" }\n",
    );
    place.ok(&["config", "check"]);
}

#[test]
fn what_is_most_likely_not_meant_is_told() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::with_file_sink(On::Sqlite);
    let with_secret = format!("[http]\ntokens = [\"canary\"]\n{}", place.read("pillarbox.toml"));
    place.write("pillarbox.toml", &with_secret);
    let said = |mode: u32, args: &[&str]| {
        std::fs::set_permissions(place.path("pillarbox.toml"), std::fs::Permissions::from_mode(mode)).unwrap();
        let output = place.command(args).env("PILLARBOX_RELAY_WORKERS", "2").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let text = format!("{}{}", stdout(&output), stderr(&output));
        assert!(text.contains("PILLARBOX__RELAY__WORKERS"), "{args:?}: {text}");
        assert!(!text.contains("canary"), "{text}");
        text
    };
    for args in [&["config", "check"][..], &["doctor"], &["run", "--until-idle"]] {
        let text = said(0o644, args);
        assert!(text.contains("line 2 holds a secret") && text.contains("chmod o-r"), "{args:?}: {text}");
        assert!(!said(0o640, args).contains("holds a secret"), "{args:?}");
    }
}

#[test]
fn the_names_of_ephemeral_subscriptions_are_taken() {
    let place = Place::new(On::Sqlite);
    place.write("pillarbox.toml", "[[subscription]]\nname = \"ephemeral.x\"\nsink = { kind = \"stdout\" }\n");
    let text = stdout(&place.command(&["config", "check"]).output().unwrap());
    assert!(text.contains("`ephemeral.`") && text.contains("run --stdout"), "{text}");
}
