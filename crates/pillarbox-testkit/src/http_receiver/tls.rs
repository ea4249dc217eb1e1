use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::Result;
use tempfile::TempDir;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::certificate::{self, AUTHORITY, CERTIFICATE, KEY};

/// A certificate for `localhost` and the authority that has signed it, made for one server.
pub(super) struct Tls {
    folder: TempDir,
    authority: PathBuf,
}

impl Tls {
    pub(super) fn make() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        certificate::make(folder.path(), || Command::new("openssl"))?;
        let authority = folder.path().join(AUTHORITY);
        Ok(Tls { folder, authority })
    }

    pub(super) fn authority(&self) -> &Path {
        &self.authority
    }

    pub(super) fn acceptor(&self) -> Result<TlsAcceptor> {
        let path = |name: &str| self.folder.path().join(name);
        let chain = CertificateDer::pem_file_iter(path(CERTIFICATE))?.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(path(KEY))?;
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}
