mod connection;

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use anyhow::{Context, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::loopback::on_free_port;
use connection::{Budget, carry};

/// A proxy in front of a port of the loopback interface. It runs on a thread of its own, so a blocked test does not hold
/// it up, and ends with the value.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    flow: watch::Sender<Flow>,
    budget: Arc<Budget>,
    orders: mpsc::UnboundedSender<Order>,
}

/// What happens to bytes and connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Pass,
    Mute,
    Stall,
    Cut,
}

/// Something for the proxy's thread to do.
#[derive(Debug)]
enum Order {
    /// Take over the flow and answer.
    Set(Flow, SyncSender<Result<()>>),
    /// A connection has spent the budget of bytes.
    Spent,
}

impl Proxy {
    /// Starts a proxy that passes everything on to a port of `127.0.0.1`.
    pub fn start(target: u16) -> Result<Proxy> {
        on_free_port(|port| Proxy::start_on(port, target))
    }

    fn start_on(port: u16, target: u16) -> Result<Proxy> {
        let (flow, _) = watch::channel(Flow::Pass);
        let (orders, received) = mpsc::unbounded_channel();
        let (answer, started) = sync_channel(1);
        let budget = Arc::new(Budget::default());
        let worker = Worker {
            port,
            target,
            flow: flow.clone(),
            budget: budget.clone(),
            orders: orders.downgrade(),
            listener: None,
            connections: JoinSet::new(),
        };
        std::thread::spawn(move || worker.run(received, answer));
        let port = started.recv().context("the proxy ended")??;
        Ok(Proxy { port, flow, budget, orders })
    }

    /// The port on `127.0.0.1`.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The same URL, by way of this proxy.
    pub fn url(&self, url: &str) -> String {
        let start = url.find("://").map_or(0, |at| at + "://".len());
        let end = url[start..].find(['/', '?']).map_or(url.len(), |at| start + at);
        let host = url[start..end].rfind('@').map_or(start, |at| start + at + 1);
        // The name stays, for a certificate may be for it.
        let name = url[host..end].rsplit_once(':').map_or(&url[host..end], |(name, _)| name);
        format!("{}{name}:{}{}", &url[..host], self.port, &url[end..])
    }

    /// Resets all connections and refuses new ones. All are closed when this returns.
    pub fn cut(&self) -> Result<()> {
        self.set(Flow::Cut)
    }

    /// Holds all bytes, both ways, and the ends of connections. New connections are accepted and hear nothing. What is
    /// under way at this moment may still arrive.
    pub fn stall(&self) -> Result<()> {
        self.set(Flow::Stall)
    }

    /// Holds what the server says, and passes on what the clients do. What is under way at this moment may still arrive.
    pub fn mute(&self) -> Result<()> {
        self.set(Flow::Mute)
    }

    /// Passes everything on again, held bytes first. New connections are accepted when this returns.
    pub fn resume(&self) -> Result<()> {
        self.budget.forget();
        self.set(Flow::Pass)
    }

    /// Passes this many more bytes of the server's on, of all connections together, then cuts as [`cut`](Proxy::cut) does.
    /// With 0, the server's next answer is lost.
    pub fn cut_after_bytes_from_server(&self, bytes: u64) {
        self.budget.set(bytes);
    }

    /// Returns when everything is cut.
    pub async fn until_cut(&self) {
        // Cannot fail: the sender is ours.
        let _ = self.flow.subscribe().wait_for(|flow| *flow == Flow::Cut).await;
    }

    fn set(&self, flow: Flow) -> Result<()> {
        let (answer, done) = sync_channel(1);
        self.orders.send(Order::Set(flow, answer)).context("the proxy has ended")?;
        done.recv().context("the proxy has ended")?
    }
}

/// What runs on the proxy's thread.
struct Worker {
    port: u16,
    target: u16,
    flow: watch::Sender<Flow>,
    budget: Arc<Budget>,
    // Weak, so that the last order is known to be the last when the proxy is dropped.
    orders: mpsc::WeakUnboundedSender<Order>,
    listener: Option<TcpListener>,
    connections: JoinSet<()>,
}

impl Worker {
    fn run(mut self, orders: mpsc::UnboundedReceiver<Order>, answer: SyncSender<Result<u16>>) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(answer.send(Err(error.into()))),
        };
        runtime.block_on(async {
            let listening = self.listen().await;
            let failed = listening.is_err();
            drop(answer.send(listening.map(|()| self.port)));
            if !failed {
                self.work(orders).await;
            }
        });
    }

    async fn work(&mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Set(flow, answer)) => drop(answer.send(self.set(flow).await)),
                    // It may be set anew or forgotten since.
                    Some(Order::Spent) if self.budget.is_spent() => self.cut().await,
                    Some(Order::Spent) => {}
                    None => return,
                },
                client = accept(self.listener.as_ref()) => self.connect(client),
                Some(_) = self.connections.join_next() => {}
            }
        }
    }

    async fn set(&mut self, flow: Flow) -> Result<()> {
        if flow == Flow::Cut {
            self.cut().await;
            return Ok(());
        }
        self.flow.send_replace(flow);
        self.listen().await
    }

    async fn cut(&mut self) {
        self.listener = None;
        self.flow.send_replace(Flow::Cut);
        while self.connections.join_next().await.is_some() {}
        self.budget.forget();
    }

    async fn listen(&mut self) -> Result<()> {
        if self.listener.is_none() {
            let bound = TcpListener::bind(("127.0.0.1", self.port)).await;
            self.listener = Some(bound.with_context(|| format!("the proxy cannot listen on port {}", self.port))?);
        }
        Ok(())
    }

    fn connect(&mut self, client: std::io::Result<TcpStream>) {
        // A client that has gone again before it was accepted.
        let Ok(client) = client else { return };
        let (target, flow) = (self.target, self.flow.subscribe());
        let (budget, orders) = (self.budget.clone(), self.orders.clone());
        self.connections.spawn(async move {
            if carry(client, target, flow, &budget).await.is_break()
                && let Some(orders) = orders.upgrade()
            {
                // Fails only if the proxy is being dropped.
                let _ = orders.send(Order::Spent);
            }
        });
    }
}

async fn accept(listener: Option<&TcpListener>) -> std::io::Result<TcpStream> {
    match listener {
        Some(listener) => listener.accept().await.map(|(client, _)| client),
        None => std::future::pending().await,
    }
}
