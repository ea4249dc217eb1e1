use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::run;

/// What lets the server use what [`make`] makes.
pub(super) const SETTINGS: &str =
    "tls-cert-file server.crt\ntls-key-file server.key\ntls-ca-cert-file authority.crt\ntls-auth-clients no";

/// A fresh key of a kind that is quick to make.
const NEW_KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30";

/// Makes an authority, and a certificate for `localhost` that it has signed.
pub(super) fn make(folder: &Path) -> Result<()> {
    let openssl = |arguments: &str, subject: &str| {
        let mut arguments: Vec<&str> = arguments.split_whitespace().collect();
        arguments.extend(["-subj", subject]);
        run(folder, "openssl", &arguments).context("no certificate could be made")
    };
    let authority = "-addext keyUsage=critical,keyCertSign -keyout authority.key -out authority.crt";
    openssl(&format!("req -x509 {NEW_KEY} {authority}"), "/CN=Pillarbox test authority")?;
    let signed = "-CA authority.crt -CAkey authority.key -keyout server.key -out server.crt";
    let names = "-addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE";
    openssl(&format!("req -x509 {NEW_KEY} {names} {signed}"), "/CN=localhost")
}

pub(super) fn authority(folder: &Path) -> PathBuf {
    folder.join("authority.crt")
}
