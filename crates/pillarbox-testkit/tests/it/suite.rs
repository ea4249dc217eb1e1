use pillarbox_testkit::store_suite::{check_all, first_failure};
use pillarbox_testkit::{Broken, MemoryFixture};

#[tokio::test]
async fn the_sound_store_passes_every_case() {
    let report = check_all(|| async { MemoryFixture::new(None) }).await;
    report.assert_sound();
    let skipped = [
        "no_call_prunes_more_than_the_stored_policy_allows",
        "a_hold_below_the_stored_policy_is_no_alarm",
        "an_event_in_a_dead_range_is_a_finding_of_doctor_until_retention_delivers_it",
        "retention_forgets_what_was_accepted_long_ago_in_slices",
        "an_operator_publishes_a_deduplication_key_once",
        "effect_published_event_and_settlement_are_committed_together",
        "a_failed_transaction_leaves_nothing_and_the_claim_stays",
        "one_that_fails_holds_back_no_other_of_its_batch",
        "a_transactional_queue_handles_each_event_once_and_in_order",
        "why_says_in_dead_range",
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
