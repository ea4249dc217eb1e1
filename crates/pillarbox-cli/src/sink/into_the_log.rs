use std::ffi::OsString;
use std::path::{Path, PathBuf};

use pillarbox_sinks::FileConfig;

use crate::config::{Config, Problem, SinkSettings};
use crate::database::Database;

/// What SQLite and Pillarbox add to the name of a database's file for files and folders of their own.
const BESIDE: [&str; 5] = ["", "-wal", "-shm", "-journal", "-pillarbox"];

/// The subscriptions whose `file` sink would write into the log's own files: lines in the middle of a database destroy it.
pub(crate) fn into_the_log(config: &Config, database: &Database) -> Vec<Problem> {
    #[cfg_attr(
        not(feature = "postgres"),
        allow(irrefutable_let_patterns, reason = "there is no other kind of database")
    )]
    let Database::Sqlite(log) = database else { return Vec::new() };
    let own: Vec<PathBuf> = BESIDE.iter().map(|end| real(&with_end(log, end))).collect();
    let is_own = |path: &Path| own.iter().any(|own| real(path).starts_with(own));
    let writes = config
        .subscriptions
        .iter()
        .filter_map(|one| Some((&one.name, paths(&one.sink).into_iter().find(|path| is_own(path))?)));
    let problem = |(name, path): (&String, &Path)| {
        let path = path.display();
        let message = format!("the file sink would write into the database itself ({path}); give it a file of its own");
        Problem::of_subscription(name, message)
    };
    writes.map(problem).collect()
}

/// The files that a sink, or one of a chain, appends to.
fn paths(sink: &SinkSettings) -> Vec<&Path> {
    let own = sink.config_of::<FileConfig>().map(|config| config.path.as_path());
    own.into_iter().chain(sink.chain().iter().flat_map(paths)).collect()
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    name.into()
}

/// Where a path leads to, whether there is a file yet or not.
fn real(path: &Path) -> PathBuf {
    if let Ok(real) = path.canonicalize() {
        return real;
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if parent.as_os_str().is_empty() => real(Path::new(".")).join(name),
        (Some(parent), Some(name)) => real(parent).join(name),
        _ => path.to_path_buf(),
    }
}
