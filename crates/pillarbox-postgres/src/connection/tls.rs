use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio_postgres::{CancelToken, Client, Config};

use super::{PgConfig, Unasked, drive};
use crate::error::Db;

/// What keeps a connection going.
pub(crate) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Connects as the `sslmode` says.
#[cfg(feature = "tls")]
pub(crate) async fn connect(postgres: &Config, config: &Arc<PgConfig>, unasked: Unasked) -> Db<(Client, Driver)> {
    use super::SslMode;
    if config.ssl_mode == SslMode::Disable {
        let (client, connection) = postgres.connect(tokio_postgres::NoTls).await?;
        return Ok((client, Box::pin(drive(connection, unasked))));
    }
    let (client, connection) = postgres.connect(rustls_connector(config)?).await?;
    Ok((client, Box::pin(drive(connection, unasked))))
}

/// Cancels as the `sslmode` says.
#[cfg(feature = "tls")]
pub(crate) async fn cancel(token: &CancelToken, config: &Arc<PgConfig>) -> Db<()> {
    use super::SslMode;
    if config.ssl_mode == SslMode::Disable {
        return Ok(token.cancel_query(tokio_postgres::NoTls).await?);
    }
    Ok(token.cancel_query(rustls_connector(config)?).await?)
}

/// Connects without encryption; what asks for more is refused.
#[cfg(not(feature = "tls"))]
pub(crate) async fn connect(postgres: &Config, config: &Arc<PgConfig>, unasked: Unasked) -> Db<(Client, Driver)> {
    refuse_tls(config)?;
    let (client, connection) = postgres.connect(tokio_postgres::NoTls).await?;
    Ok((client, Box::pin(drive(connection, unasked))))
}

/// Cancels without encryption.
#[cfg(not(feature = "tls"))]
pub(crate) async fn cancel(token: &CancelToken, _config: &Arc<PgConfig>) -> Db<()> {
    Ok(token.cancel_query(tokio_postgres::NoTls).await?)
}

#[cfg(not(feature = "tls"))]
fn refuse_tls(config: &PgConfig) -> Db<()> {
    use super::SslMode;
    if matches!(config.ssl_mode, SslMode::Disable | SslMode::Prefer) {
        return Ok(());
    }
    Err(crate::error::DbError::own(
        pillarbox::ErrorKind::Invalid,
        "this build cannot encrypt connections; build pillarbox-postgres with the feature `tls`, or use sslmode=prefer",
    ))
}

#[cfg(feature = "tls")]
fn rustls_connector(config: &PgConfig) -> Db<tokio_postgres_rustls::MakeRustlsConnect> {
    rustls_config::client(config).map(tokio_postgres_rustls::MakeRustlsConnect::new)
}

#[cfg(feature = "tls")]
mod rustls_config;
