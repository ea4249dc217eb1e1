//! For those who implement a [`Store`](crate::Store): what turning rows into events takes.
use std::collections::HashSet;
use std::sync::Arc;

use crate::Filter;

/// How many different names are kept for sharing.
const NAMES_MAX: usize = 1024;

/// Decides whether a subscription wants an event, remembering the last answer.
#[derive(Debug)]
pub struct Wanted<'a> {
    filters: &'a [Filter],
    all: bool,
    last: Option<(Arc<str>, Arc<str>, bool)>,
}

impl<'a> Wanted<'a> {
    /// For these subscriptions.
    pub fn new(filters: &'a [Filter]) -> Self {
        Wanted { filters, all: filters.iter().any(Filter::is_all), last: None }
    }

    /// Whether one of them wants an event of this topic and type.
    pub fn has(&mut self, topic: &Arc<str>, r#type: &Arc<str>) -> bool {
        if self.all {
            return true;
        }
        match &self.last {
            Some((last_topic, last_type, answer))
                if Arc::ptr_eq(last_topic, topic) && Arc::ptr_eq(last_type, r#type) =>
            {
                *answer
            }
            _ => {
                let answer = self.filters.iter().any(|filter| filter.matches(topic, r#type));
                self.last = Some((topic.clone(), r#type.clone(), answer));
                answer
            }
        }
    }
}

/// Shares equal names, so that a million events of one topic hold one allocation of it.
#[derive(Debug, Default)]
pub struct Names {
    last: Option<Arc<str>>,
    known: HashSet<Arc<str>>,
}

impl Names {
    /// The shared allocation of this name.
    pub fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(last) = &self.last
            && **last == *text
        {
            return last.clone();
        }
        let name = match self.known.get(text) {
            Some(known) => known.clone(),
            None => {
                if self.known.len() >= NAMES_MAX {
                    self.known.clear();
                }
                let name: Arc<str> = text.into();
                self.known.insert(name.clone());
                name
            }
        };
        self.last = Some(name.clone());
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shared_and_bounded() {
        let mut names = Names::default();
        let (a, b) = (names.share("a"), names.share("b"));
        assert!(Arc::ptr_eq(&a, &names.share("a")) && Arc::ptr_eq(&b, &names.share("b")));
        for number in 0..3 * NAMES_MAX {
            names.share(&number.to_string());
        }
        assert!(names.known.len() <= NAMES_MAX);
    }
}
