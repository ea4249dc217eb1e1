use pillarbox_testkit::store_suite::{check_all, first_failure};
use pillarbox_testkit::{Broken, MemoryFixture};

#[tokio::test]
async fn the_sound_store_passes_every_case() {
    let report = check_all(|| async { MemoryFixture::new(None) }).await;
    report.assert_sound();
    let skipped = [
        "retention_forgets_what_was_accepted_long_ago_in_slices",
        "an_operator_publishes_a_deduplication_key_once",
        "effect_published_event_and_settlement_are_committed_together",
        "a_failed_transaction_leaves_nothing_and_the_claim_stays",
        "one_that_fails_holds_back_no_other_of_its_batch",
        "a_transactional_queue_handles_each_event_once_and_in_order",
    ];
    assert_eq!(report.skipped, skipped, "only what a log in memory has no part for");
}

#[tokio::test]
async fn every_broken_store_fails() {
    for broken in Broken::ALL {
        let failure = first_failure(move || async move { MemoryFixture::new(Some(broken)) }).await;
        println!("{broken:?}: {failure:?}");
        assert!(failure.is_some(), "the suite does not notice {broken:?}");
    }
}
