use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pillarbox::Failure;
use tokio::sync::{mpsc, watch};

use crate::Activity;

/// The open sockets of all people; channels stand for them. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Sockets(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    open: Mutex<HashMap<String, mpsc::UnboundedSender<Activity>>>,
    figures: watch::Sender<Figures>,
}

/// What became of broadcasts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// A socket has taken so many.
    pub sent: usize,
    /// So many were for somebody who was not there.
    pub refused: usize,
}

impl Sockets {
    /// Opens a person's socket.
    pub fn connect(&self, person: &str) -> Client {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.open().insert(person.to_owned(), sender);
        Client { person: person.to_owned(), receiver, last: 0, repeated: 0 }
    }

    /// Closes all of them; a client still gets what was sent.
    pub fn close(&self) {
        self.open().clear();
    }

    /// Waits until the figures are like that.
    pub async fn wait_for(&self, wanted: impl FnMut(&Figures) -> bool) -> Figures {
        let mut figures = self.0.figures.subscribe();
        *figures.wait_for(wanted).await.expect("this holds the sender")
    }

    /// Sends somebody the news. An error if they are not there: it is tried again, and nobody else waits for it.
    pub(crate) fn send(&self, activity: Activity) -> Result<(), Failure> {
        let person = activity.mention.person.clone();
        let sent = self.open().get(&person).is_some_and(|socket| socket.send(activity).is_ok());
        self.0.figures.send_modify(|figures| if sent { figures.sent += 1 } else { figures.refused += 1 });
        if sent { Ok(()) } else { Err(Failure::event(format!("{person} is not connected"))) }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<String, mpsc::UnboundedSender<Activity>>> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A person's end of a socket.
#[derive(Debug)]
pub struct Client {
    person: String,
    receiver: mpsc::UnboundedReceiver<Activity>,
    last: i64,
    repeated: usize,
}

impl Client {
    /// Whose it is.
    pub fn person(&self) -> &str {
        &self.person
    }

    /// The next activity; None when the socket was closed.
    ///
    /// What was sent just before its process died was not committed, and is sent again. The numbers of a list rise, so one look
    /// tells.
    pub async fn next(&mut self) -> Option<Activity> {
        loop {
            let activity = self.receiver.recv().await?;
            if activity.number > self.last {
                self.last = activity.number;
                return Some(activity);
            }
            self.repeated += 1;
        }
    }

    /// How many came again and were not shown.
    pub fn repeated(&self) -> usize {
        self.repeated
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mention;

    fn activity(number: i64) -> Activity {
        let mention = Mention { person: "ada".into(), conversation: "c".into(), message: number };
        Activity { number, mention }
    }

    #[tokio::test]
    async fn what_is_sent_again_is_shown_once() {
        let sockets = Sockets::default();
        let mut ada = sockets.connect("ada");
        for number in [1, 2, 2, 3] {
            sockets.send(activity(number)).unwrap();
        }
        sockets.close();
        for number in 1..=3 {
            assert_eq!(ada.next().await, Some(activity(number)));
        }
        assert_eq!((ada.next().await, ada.repeated()), (None, 1));
    }

    #[tokio::test]
    async fn nobody_there_is_an_error() {
        let sockets = Sockets::default();
        assert_eq!(sockets.send(activity(1)), Err(Failure::event("ada is not connected")));
        drop(sockets.connect("ada"));
        sockets.send(activity(1)).unwrap_err();
        assert_eq!(sockets.wait_for(|_| true).await, Figures { sent: 0, refused: 2 });
    }
}
