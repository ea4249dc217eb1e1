use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};

use super::{Server, client};

/// Makes the names of databases unique on a server.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A database for one test; dropped with this value, whoever is still connected.
#[derive(Debug)]
pub struct Database {
    name: String,
    url: String,
    maintenance_url: String,
}

impl Database {
    pub(super) fn create(server: &Server) -> Result<Database> {
        let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let maintenance_url = server.url("postgres");
        client::run(&maintenance_url, &format!("create database {name}")).context("no database could be made")?;
        Ok(Database { url: server.url(&name), name, maintenance_url })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where a client reaches it, as the superuser.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Runs statements and returns the rows, one a line, columns parted by `|`.
    pub fn psql(&self, sql: &str) -> Result<String> {
        client::run(&self.url, sql)
    }

    /// What was prepared and forgotten would hold the horizon of all other tests, and keep the database from being dropped.
    fn forget_prepared(&self) -> Result<()> {
        let theirs = format!("select quote_literal(gid) from pg_prepared_xacts where database = '{}'", self.name);
        for transaction in client::run(&self.maintenance_url, &theirs)?.lines() {
            client::run(&self.url, &format!("rollback prepared {transaction}"))?;
        }
        Ok(())
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // The server may be stopped; then all of it goes soon.
        let _ = self.forget_prepared();
        let _ = client::run(&self.maintenance_url, &format!("drop database if exists {} with (force)", self.name));
    }
}
