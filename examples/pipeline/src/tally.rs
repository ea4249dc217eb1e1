use std::collections::{BTreeMap, HashMap};

use crate::{Activity, Client, Mention};

/// Compares what people should be told with what they were told.
#[derive(Debug, Default)]
pub struct Tally {
    arrivals: BTreeMap<Mention, usize>,
    /// The last message that a person was told of in a conversation.
    latest: HashMap<(String, String), i64>,
    problems: Vec<String>,
}

impl Tally {
    /// This one has to arrive.
    pub fn expect(&mut self, mention: Mention) {
        self.arrivals.insert(mention, 0);
    }

    /// All that `other` expects too.
    pub fn expect_all_of(&mut self, other: Tally) {
        self.arrivals.extend(other.arrivals);
    }

    /// How many have to arrive.
    pub fn expected(&self) -> usize {
        self.arrivals.len()
    }

    /// How many have arrived once.
    pub fn told_once(&self) -> usize {
        self.arrivals.values().filter(|arrivals| **arrivals == 1).count()
    }

    /// How many of a person's have not arrived.
    pub fn owed(&self, person: &str) -> usize {
        self.arrivals.iter().filter(|(mention, arrivals)| mention.person == person && **arrivals == 0).count()
    }

    /// Notes what a client is told until all of its person's have arrived, or the socket is closed.
    pub async fn listen(&mut self, client: &mut Client) {
        while self.owed(client.person()) > 0 {
            let Some(activity) = client.next().await else { return };
            self.arrived(&activity);
        }
    }

    /// Notes what a client is told until the socket is closed.
    pub async fn listen_to_the_end(&mut self, client: &mut Client) {
        while let Some(activity) = client.next().await {
            self.arrived(&activity);
        }
    }

    /// Notes what somebody was told. What is not expected was left by others who used the same database, and does not count.
    pub fn arrived(&mut self, activity: &Activity) {
        let Mention { person, conversation, message } = &activity.mention;
        let Some(arrivals) = self.arrivals.get_mut(&activity.mention) else { return };
        *arrivals += 1;
        let latest = self.latest.insert((person.clone(), conversation.clone()), *message);
        if let Some(latest) = latest.filter(|latest| latest > message) {
            self.problems.push(format!("{person} was told of message {message} of {conversation} after {latest}"));
        }
    }

    /// What is wrong: not told, told more than once, out of order.
    pub fn problems(&self) -> Vec<String> {
        let wrong = self.arrivals.iter().filter(|(_, arrivals)| **arrivals != 1).map(|(mention, arrivals)| {
            let Mention { person, conversation, message } = mention;
            format!("{person} was told {arrivals} times of message {message} of {conversation}")
        });
        wrong.chain(self.problems.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mention(person: &str, message: i64) -> Mention {
        Mention { person: person.into(), conversation: "c".into(), message }
    }

    fn check(arrived: &[(&str, i64)], problems: &[&str]) {
        let mut tally = Tally::default();
        for (person, message) in [("ada", 1), ("ada", 2), ("grace", 1)] {
            tally.expect(mention(person, message));
        }
        for (number, (person, message)) in (1..).zip(arrived) {
            tally.arrived(&Activity { number, mention: mention(person, *message) });
        }
        assert_eq!(tally.problems(), problems, "{arrived:?}");
    }

    #[test]
    fn lost_repeated_and_disordered_are_told_apart() {
        check(&[("ada", 1), ("grace", 1), ("ada", 2), ("alan", 5)], &[]);
        check(&[("ada", 1), ("grace", 1)], &["ada was told 0 times of message 2 of c"]);
        check(&[("ada", 1), ("ada", 2), ("grace", 1), ("grace", 1)], &["grace was told 2 times of message 1 of c"]);
        check(&[("ada", 2), ("ada", 1), ("grace", 1)], &["ada was told of message 1 of c after 2"]);
    }
}
