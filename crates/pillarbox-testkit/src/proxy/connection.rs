use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::watch;

use super::Flow;

/// How many bytes are carried at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// How many of the server's bytes may still pass; unlimited if none was set.
#[derive(Debug, Default)]
pub(super) struct Budget(Mutex<Option<u64>>);

impl Budget {
    pub(super) fn set(&self, bytes: u64) {
        *self.left() = Some(bytes);
    }

    pub(super) fn forget(&self) {
        *self.left() = None;
    }

    pub(super) fn is_spent(&self) -> bool {
        *self.left() == Some(0)
    }

    /// How many of these bytes may pass, and whether they are the last.
    fn take(&self, wanted: usize) -> (usize, bool) {
        let mut left = self.left();
        let Some(bytes) = *left else { return (wanted, false) };
        let taken = usize::try_from(bytes).unwrap_or(usize::MAX).min(wanted);
        *left = Some(bytes - taken as u64);
        (taken, *left == Some(0))
    }

    fn left(&self) -> MutexGuard<'_, Option<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a direction carries no more, besides a clean end.
enum End {
    Lost,
    Spent,
}

/// Carries one connection to its end. Breaks if that is because the budget was spent.
pub(super) async fn carry(
    mut client: TcpStream,
    target: u16,
    flow: watch::Receiver<Flow>,
    budget: &Budget,
) -> ControlFlow<()> {
    let mut server = None;
    let mut cut = flow.clone();
    tokio::select! {
        _ = cut.wait_for(|flow| *flow == Flow::Cut) => {
            // Closed so, a peer hears a reset. It cannot fail in a way that matters: then the peer hears an end.
            let _ = client.set_zero_linger();
            let _ = server.as_ref().map(TcpStream::set_zero_linger);
            ControlFlow::Continue(())
        }
        spent = exchange(&mut client, &mut server, target, flow, budget) => spent,
    }
}

async fn exchange(
    client: &mut TcpStream,
    server: &mut Option<TcpStream>,
    target: u16,
    mut flow: watch::Receiver<Flow>,
    budget: &Budget,
) -> ControlFlow<()> {
    until_passing(&mut flow, &[Flow::Stall]).await;
    let Ok(connected) = TcpStream::connect(("127.0.0.1", target)).await else {
        return ControlFlow::Continue(());
    };
    let server = server.insert(connected);
    // As quick as without a proxy; a failure only costs time.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (client_read, client_write) = client.split();
    let (server_read, server_write) = server.split();
    let to_server = pass_on(client_read, server_write, flow.clone(), None);
    let to_client = pass_on(server_read, client_write, flow, Some(budget));
    match tokio::try_join!(to_server, to_client) {
        Err(End::Spent) => ControlFlow::Break(()),
        Err(End::Lost) | Ok(_) => ControlFlow::Continue(()),
    }
}

/// Carries one direction.
async fn pass_on(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut flow: watch::Receiver<Flow>,
    budget: Option<&Budget>,
) -> Result<(), End> {
    // Only the server's direction has a budget.
    let held: &[Flow] = if budget.is_some() { &[Flow::Stall, Flow::Mute] } else { &[Flow::Stall] };
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        until_passing(&mut flow, held).await;
        let read = from.read(&mut chunk).await.map_err(|_| End::Lost)?;
        // It may have changed while there was nothing to read.
        until_passing(&mut flow, held).await;
        if read == 0 {
            return to.shutdown().await.map_err(|_| End::Lost);
        }
        let (passing, is_last) = budget.map_or((read, false), |budget| budget.take(read));
        to.write_all(&chunk[..passing]).await.map_err(|_| End::Lost)?;
        if is_last {
            return Err(End::Spent);
        }
    }
}

async fn until_passing(flow: &mut watch::Receiver<Flow>, held: &[Flow]) {
    // Fails only when the proxy is gone, and this with it.
    let _ = flow.wait_for(|flow| !held.contains(flow)).await;
}
