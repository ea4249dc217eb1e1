use pillarbox_testkit::store_suite::{SuiteReport, check_all};
use pillarbox_testkit::{Broken, MemoryFixture};

async fn check(broken: Option<Broken>) -> SuiteReport {
    check_all(|| async move { MemoryFixture::new(broken) }).await
}

#[tokio::test]
async fn the_sound_store_passes_every_case() {
    let report = check(None).await;
    report.assert_sound();
    assert_eq!(report.skipped, Vec::<&str>::new());
}

#[tokio::test]
async fn every_broken_store_fails() {
    for broken in Broken::ALL {
        let report = check(Some(broken)).await;
        println!("{broken:?}: {report}");
        assert!(!report.failed.is_empty(), "the suite does not notice {broken:?}");
    }
}
