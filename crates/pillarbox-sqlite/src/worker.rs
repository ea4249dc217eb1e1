use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle, Thread};
use std::time::Instant;

use pillarbox::{Error, ErrorKind, Result};
use tokio::sync::oneshot;

use crate::error::{Db, DbError};

/// A thread that owns what may block, so that no async caller ever does. It ends when this value is dropped, after the
/// jobs that were asked for.
#[derive(Debug)]
pub(crate) struct Worker<C> {
    /// None once it is to end.
    jobs: Option<Sender<Job<C>>>,
    thread: Ending,
}

/// A thread that is waited for when it has been told to end.
#[derive(Debug)]
pub(crate) struct Ending {
    thread: Option<JoinHandle<()>>,
    /// Only ever looked at by the owner; the lock is there to make this value shareable.
    ended: Mutex<Receiver<()>>,
}

impl Ending {
    /// Starts the thread.
    pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Db<Self> {
        let (alive, ended) = channel();
        let body = move || {
            body();
            // All that the body owned is gone: only now may somebody rely on it.
            drop(alive);
        };
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn(body)
            .map_err(|source| DbError::io("a thread of the store could not be started", source))?;
        Ok(Ending { thread: Some(thread), ended: Mutex::new(ended) })
    }

    /// The thread, while it has not been joined.
    pub(crate) fn thread(&self) -> Option<&Thread> {
        self.thread.as_ref().map(JoinHandle::thread)
    }

    /// Waits for the end, but not beyond `deadline`: a thread that waits for another's lock ends by itself later.
    pub(crate) fn join(&mut self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = self.ended.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        if ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            return;
        }
        // A panic was reported to whoever asked for the job.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

type Job<C> = Box<dyn FnOnce(&mut C) + Send>;

impl<C: Send + 'static> Worker<C> {
    /// Starts the thread.
    pub(crate) fn spawn(name: &str, mut state: C) -> Db<Self> {
        let (jobs, queue) = channel::<Job<C>>();
        let body = move || queue.into_iter().for_each(|job| job(&mut state));
        Ok(Worker { jobs: Some(jobs), thread: Ending::spawn(name, body)? })
    }

    /// Tells the thread to end.
    pub(crate) fn stop(&mut self) {
        self.jobs.take();
    }

    /// Waits for the thread's end after [`Worker::stop`].
    pub(crate) fn join(&mut self, deadline: Instant) {
        self.thread.join(deadline);
    }

    /// Runs `job` on the thread, behind those that were asked for earlier.
    pub(crate) async fn run<T: Send + 'static>(&self, job: impl FnOnce(&mut C) -> Db<T> + Send + 'static) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        // The caller may have gone away; the job has run whole all the same.
        let job = Box::new(move |state: &mut C| drop(reply.send(job(state))));
        let gone = || Error::new(ErrorKind::Fatal, "a thread of the store has ended by a panic; restart the process");
        self.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())?;
        Ok(answer.await.map_err(|_| gone())??)
    }
}
