use std::time::Duration;

use tokio::time::Instant;

/// How long a test waits for what has to come, before it fails.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// How often it looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Looks until there is something. For what a foreign server does and tells nobody; where there is a signal, wait for that.
///
/// # Panics
/// If it does not come in time.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let given_up = Instant::now() + WAIT_MAX;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < given_up, "waited in vain: {what}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
