use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::secret::Redactions;

/// What no panic of this process may say: the secrets of every sink that was built, or was tried to be.
static SECRETS: LazyLock<Mutex<Redactions>> = LazyLock::new(Mutex::default);

/// From now on a panic is a line of the log, without the secrets of any sink. It is told before it can be caught, and so cannot
/// be redacted later.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(log));
}

/// No panic tells these from now on.
pub(super) fn hide(redactions: &Redactions) {
    SECRETS.lock().unwrap_or_else(PoisonError::into_inner).add(redactions);
}

fn log(panic: &PanicHookInfo<'_>) {
    let said = without_secrets(panic.payload_as_str().unwrap_or("no message"));
    let place = panic.location().map(tracing::field::display);
    let thread = std::thread::current();
    // As the library would: only if `RUST_BACKTRACE` asks for it.
    let backtrace = Some(Backtrace::capture()).filter(|backtrace| backtrace.status() == BacktraceStatus::Captured);
    let backtrace = backtrace.map(tracing::field::display);
    tracing::error!(said, place, thread = thread.name(), backtrace, "panicked");
}

fn without_secrets(text: &str) -> String {
    SECRETS.lock().unwrap_or_else(PoisonError::into_inner).apply(text)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Tells the test below that it is in a process of its own.
    const OWN_PROCESS: &str = "PILLARBOX_TEST_PANICS";

    /// A hook is of the whole process, and would take from other tests what they say when they fail.
    #[test]
    fn a_panic_is_a_line_of_the_log_without_the_secret() {
        if std::env::var_os(OWN_PROCESS).is_some() {
            tracing_subscriber::fmt().json().with_writer(std::io::stderr).init();
            hide(&Redactions::new([("sesame".to_owned(), "***".to_owned())]));
            log_panics();
            let thread = std::thread::Builder::new().name("sink".to_owned());
            let panics = thread.spawn(|| panic!("cannot log in with {}", "sesame")).unwrap();
            assert!(panics.join().is_err());
            return;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = concat!(module_path!(), "::a_panic_is_a_line_of_the_log_without_the_secret");
        let name = name.split_once("::").unwrap().1;
        let output = command.args([name, "--exact", "--nocapture"]).env(OWN_PROCESS, "1").output().unwrap();
        let (said, ran) = (String::from_utf8(output.stderr).unwrap(), String::from_utf8(output.stdout).unwrap());
        assert!(output.status.success() && ran.contains("1 passed"), "{ran}{said}");
        assert!(!said.contains("sesame"), "{said}");
        let line = said.lines().find(|line| line.contains("panicked")).expect("the panic is told");
        let fields = serde_json::from_str::<serde_json::Value>(line).unwrap()["fields"].clone();
        assert_eq!((&fields["said"], &fields["thread"]), (&"cannot log in with ***".into(), &"sink".into()), "{line}");
        assert!(fields["place"].as_str().unwrap().contains("panic.rs"), "{line}");
    }

    #[test]
    fn a_panic_tells_no_secret_of_any_sink() {
        // The second contains the first.
        for secret in ["sesame", "open-sesame-now"] {
            hide(&Redactions::new([(secret.to_owned(), "***".to_owned())]));
        }
        let said = without_secrets("cannot log in with sesame or open-sesame-now at h:5432");
        assert_eq!(said, "cannot log in with *** or *** at h:5432");
    }
}
