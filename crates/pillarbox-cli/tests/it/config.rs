use crate::place::{Place, stderr, stdout};

#[test]
fn an_unknown_key_stops_run_with_its_neighbour() {
    let place = Place::new();
    place.write("pillarbox.toml", "[relay]\nbatchsize = 5\n");
    for args in [&["run", "--until-idle"][..], &["config", "print"]] {
        let text = place.fails(1, args);
        assert!(text.contains("line 2") && text.contains("did you mean `batch_size`?"), "{text}");
    }
}

#[test]
fn check_lists_every_problem() {
    let place = Place::new();
    place.write(
        "pillarbox.toml",
        "[relay]\nwokers = 5\n[[subscription]]\nname = \"k\"\nsink = { kind = \"kafka\", brokers = \"b\", topic = \"t\" }\n",
    );
    let output = place.command(&["config", "check"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains("did you mean `workers`?"), "{text}");
    assert!(text.contains("sink kind 'kafka' is not in this build; built in: stdout, file"), "{text}");
    let text = place.fails(1, &["run", "--until-idle"]);
    assert!(text.contains("kafka"), "{text}");
    place.write("pillarbox.toml", "");
    assert_eq!(place.json(&["config", "check"])["ok"], true);
}

#[test]
fn print_shows_what_is_in_force_without_secrets() {
    let place = Place::new();
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
    let place = Place::new();
    place.write("pillarbox.toml", "database = \"sqlite:file.db\"\n");
    let shown = |command: &mut std::process::Command| stdout(&command.output().unwrap());
    assert!(shown(&mut place.bare(&["config", "print"])).contains("sqlite:file.db"));
    assert!(shown(&mut place.command(&["config", "print"])).contains("sqlite:app.db"));
    assert!(shown(&mut place.command(&["config", "print", "--database", "sqlite:flag.db"])).contains("sqlite:flag.db"));
}

#[test]
fn a_named_config_that_is_not_there_is_wrong_usage() {
    let text = Place::new().fails(2, &["run", "--config", "nowhere.toml"]);
    assert!(text.contains("nowhere.toml"), "{text}");
}
