use std::future::{Future, IntoFuture};

use anyhow::Result;
use axum::Router;
use axum::routing::post;
use pillarbox::{Relay, Subscription};
use pillarbox_postgres::{PostgresStore, Transactional};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::confirmation::{Mailbox, confirm};
use crate::{invoice, order};

const TABLES: [&str; 2] = [
    "create table if not exists orders (id bigserial primary key, customer text not null, cents bigint not null)",
    "create table if not exists invoice (id bigserial primary key, order_id bigint not null, cents bigint not null)",
];

/// The service: its pool, and its relay on the same database.
pub struct Service {
    pool: PgPool,
    relay: Relay,
}

impl Service {
    /// Prepares the database and begins to handle events.
    pub async fn start(url: &str, mailbox: Mailbox) -> Result<Self> {
        pillarbox_postgres::migrate(&url.parse()?).await?;
        let pool = PgPool::connect(url).await?;
        for table in TABLES {
            sqlx::query(table).execute(&pool).await?;
        }
        let bookkeeping = Subscription::queue("bookkeeping").topics([order::TOPIC]);
        let confirmations = Subscription::stream("confirmations").topics([invoice::TOPIC]);
        let relay = Relay::builder(PostgresStore::open(url).await?)
            .transact(bookkeeping, Transactional::with_sqlx(pool.clone(), invoice::book))
            .handle_with(confirmations, mailbox, confirm)
            .start()
            .await?;
        Ok(Service { pool, relay })
    }

    /// Serves until `stop` is over or the relay ends by itself. Then it stops in this order: no new requests, and those that have begun
    /// are answered; no new events, and those that are being handled are finished and settled; no connections. What is not handled by
    /// then is handled after the next start.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) -> Result<()> {
        let Service { pool, relay } = self;
        let routes = Router::new().route("/orders", post(order::place)).with_state(pool.clone());
        let (stopping, stopped) = oneshot::channel::<()>();
        let server = axum::serve(listener, routes).with_graceful_shutdown(async move { drop(stopped.await) });
        let server = tokio::spawn(server.into_future());
        let failed = tokio::select! {
            () = stop => None,
            error = relay.failed() => Some(error),
        };
        drop(stopping);
        server.await??;
        relay.drain().await?;
        pool.close().await;
        failed.map_or(Ok(()), |error| Err(error.into()))
    }
}
