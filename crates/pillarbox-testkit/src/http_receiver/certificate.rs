use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A fresh key of a kind that is quick to make.
const NEW_KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

/// A certificate for `localhost` and the authority that has signed it, made for one server.
pub(super) struct Certificate {
    directory: TempDir,
    authority: PathBuf,
}

impl Certificate {
    pub(super) fn make() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let authority = ["req", "-x509", "-subj", "/CN=Pillarbox test authority", "-days", "30"];
        let signs = ["-addext", "keyUsage=critical,keyCertSign", "-keyout", "authority.key", "-out", "authority.crt"];
        openssl(directory.path(), &[&authority[..], &NEW_KEY, &signs].concat())?;
        let request = ["req", "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr"];
        openssl(directory.path(), &[&request[..], &NEW_KEY].concat())?;
        let extensions = "subjectAltName = DNS:localhost\nbasicConstraints = critical,CA:FALSE\n";
        std::fs::write(directory.path().join("server.ext"), extensions)?;
        let sign = ["x509", "-req", "-in", "server.csr", "-CA", "authority.crt", "-CAkey", "authority.key"];
        let into = ["-CAcreateserial", "-days", "30", "-extfile", "server.ext", "-out", "server.crt"];
        openssl(directory.path(), &[&sign[..], &into].concat())?;
        let authority = directory.path().join("authority.crt");
        Ok(Certificate { directory, authority })
    }

    pub(super) fn authority(&self) -> &Path {
        &self.authority
    }

    pub(super) fn acceptor(&self) -> Result<TlsAcceptor> {
        let path = |name: &str| self.directory.path().join(name);
        let chain = CertificateDer::pem_file_iter(path("server.crt"))?.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(path("server.key"))?;
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

fn openssl(directory: &Path, arguments: &[&str]) -> Result<()> {
    let output = Command::new("openssl")
        .args(arguments)
        .current_dir(directory)
        .output()
        .context("no certificate could be made; is `openssl` there? (`apt-get install -y openssl`)")?;
    ensure!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
