use std::path::PathBuf;
use std::process::Command;
use std::time::SystemTime;

/// What all functions here are handed to.
const HANDED_TO: &str = "
    use pillarbox::store::{IsTransactionHandler, Store, TransactionHandler};
    use pillarbox::{Delivery, Failure, RelayBuilder, Subscription, admin::Operator, with_state};
    pub struct Transaction<'a>(&'a str);
    pub fn handle<S: Store + Operator>(builder: RelayBuilder<S>) -> RelayBuilder<S> {
        builder.handle(Subscription::stream(\"s\"), handler)
    }
    pub fn transact() {
        fn is_transactional<K>(
            _: impl for<'a> IsTransactionHandler<&'a Transaction<'a>, K> + for<'a> TransactionHandler<&'a Transaction<'a>>,
        ) {
        }
        is_transactional(book);
        is_transactional(with_state(1, book_with));
    }
";

/// The library that this test is built with, or one that was built later.
fn library() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let built_at = |path: &PathBuf| path.metadata().and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libpillarbox-") && name.ends_with(".rlib")
    };
    files.filter(is_library).max_by_key(built_at).expect("the library that this test uses is beside it")
}

/// What the compiler says to these three functions.
fn said_to(handler: &str, book: &str, book_with: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("application.rs"), library());
    std::fs::write(&source, [HANDED_TO, handler, book, book_with].join("\n")).unwrap();
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()))
        .args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--color=never", "-Aunused", "--out-dir"])
        .arg(folder.path())
        .arg(format!("--extern=pillarbox={}", library.display()))
        .arg(format!("-Ldependency={}", library.parent().unwrap().display()))
        .arg(&source)
        .output()
        .unwrap();
    String::from_utf8(output.stderr).unwrap()
}

/// The three functions with this first argument, result and body.
fn said_to_functions(head: &str, argument: &str, result: &str, body: &str) -> String {
    let function = |name: &str, arguments: &str| format!("{head} {name}({arguments}) -> {result} {{ {body} }}");
    said_to(
        &function("handler", &format!("_: {argument}")),
        &function("book", &format!("_: &Transaction<'_>, _: {argument}")),
        &function("book_with", &format!("_: i32, _: &Transaction<'_>, _: {argument}")),
    )
}

/// Each mistake is told in words, and then exactly.
fn check(head: &str, argument: &str, result: &str, body: &str, exactly: &str) {
    let said = said_to_functions(head, argument, result, body);
    for (words, times) in [
        ("{handler}` is not a handler of events", 1),
        ("{book}` is not a transactional handler for `&'a Transaction<'a>`", 1),
        ("{book_with}>` is not a transactional handler for `&'a Transaction<'a>`", 1),
        ("a handler takes a `pillarbox::Delivery` and returns `Result<(), pillarbox::Failure>`", 1),
        ("its future must be `Send`: hold no `Rc`, `RefCell` borrow or `MutexGuard` across an `.await`", 3),
    ] {
        assert_eq!(said.matches(words).count(), times, "{words}: {said}");
    }
    assert!(said.contains(exactly), "{exactly}: {said}");
}

const RESULT: &str = "Result<(), Failure>";

#[test]
fn a_handler_compiles() {
    assert_eq!(said_to_functions("async fn", "Delivery", RESULT, "Ok(())"), "");
}

#[test]
fn a_wrong_argument_is_explained() {
    check("async fn", "String", RESULT, "Ok(())", "found function signature `fn(String) -> _`");
}

#[test]
fn a_wrong_result_is_explained() {
    check(
        "async fn",
        "Delivery",
        "std::io::Result<()>",
        "Ok(())",
        "expected `Result<(), Failure>`, found `Result<(), Error>`",
    );
}

#[test]
fn a_function_that_is_not_async_is_explained() {
    check("fn", "Delivery", RESULT, "Ok(())", "`Result<(), Failure>` is not a future");
}

#[test]
fn a_future_that_is_not_send_is_explained() {
    let body = "let count = std::rc::Rc::new(1); std::future::ready(()).await; Ok(drop(count))";
    check("async fn", "Delivery", RESULT, body, "has type `Rc<i32>` which is not `Send`");
}
