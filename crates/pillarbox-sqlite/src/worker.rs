use std::sync::mpsc::{Sender, channel};
use std::thread;

use pillarbox::{Error, ErrorKind, Result};
use tokio::sync::oneshot;

use crate::error::{Db, DbError};

/// A thread that owns what may block, so that no async caller ever does. It ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Worker<C> {
    jobs: Sender<Job<C>>,
}

type Job<C> = Box<dyn FnOnce(&mut C) + Send>;

impl<C: Send + 'static> Worker<C> {
    /// Starts the thread.
    pub(crate) fn spawn(name: &str, mut state: C) -> Db<Self> {
        let (jobs, queue) = channel::<Job<C>>();
        let body = move || queue.into_iter().for_each(|job| job(&mut state));
        thread::Builder::new()
            .name(name.into())
            .spawn(body)
            .map_err(|source| DbError::io("a thread of the store could not be started", source))?;
        Ok(Worker { jobs })
    }

    /// Runs `job` on the thread, behind those that were asked for earlier.
    pub(crate) async fn run<T: Send + 'static>(&self, job: impl FnOnce(&mut C) -> Db<T> + Send + 'static) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        // The caller may have gone away; the job has run whole all the same.
        let job = Box::new(move |state: &mut C| drop(reply.send(job(state))));
        let gone = || Error::new(ErrorKind::Fatal, "a thread of the store has ended by a panic; restart the process");
        self.jobs.send(job).map_err(|_| gone())?;
        Ok(answer.await.map_err(|_| gone())??)
    }
}
