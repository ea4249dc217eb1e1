use crate::place::{Place, stderr, stdout};

#[test]
fn the_demo_loses_nothing() {
    let place = Place::empty();
    let output = place.bare(&["demo", "--seconds", "2"]).output().unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    let last = text.lines().last().unwrap();
    let numbers: Vec<u64> = last.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
    let [published, delivered, duplicates, lost] = numbers[..] else { panic!("{last}") };
    assert_eq!(last, format!("published {published}, delivered {delivered}, duplicates {duplicates}, lost {lost}"));
    assert!(published > 100 && delivered == published && lost == 0, "{last}");
    assert!(text.contains("kill -9") && text.contains("pillarbox why"), "{text}");
    assert!(!text.contains('\x1b'));
    assert_eq!(std::fs::read_dir(place.path("")).unwrap().count(), 0, "the demo left files where it was started");
}
