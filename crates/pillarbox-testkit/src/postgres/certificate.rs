use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::folder::Folder;
use super::process::run;

const AUTHORITY: &str = "authority.crt";
const AUTHORITY_KEY: &str = "authority.key";
const CERTIFICATE: &str = "server.crt";
const KEY: &str = "server.key";
const REQUEST: &str = "server.csr";
const EXTENSIONS: &str = "server.ext";

/// A fresh key of a kind that is quick to make.
const NEW_KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

/// Makes an authority and a certificate for `localhost` that it has signed, among the cluster's files: so copies of the
/// cluster have them too.
pub(super) fn make(folder: &Folder) -> Result<()> {
    let authority = ["req", "-x509", "-subj", "/CN=Pillarbox test authority", "-days", "30"];
    let signs = ["-addext", "keyUsage=critical,keyCertSign", "-keyout", AUTHORITY_KEY, "-out", AUTHORITY];
    openssl(folder, &[&authority[..], &NEW_KEY, &signs].concat())?;
    let request = ["req", "-subj", "/CN=localhost", "-keyout", KEY, "-out", REQUEST];
    openssl(folder, &[&request[..], &NEW_KEY].concat())?;
    folder.add_to(EXTENSIONS, "subjectAltName = DNS:localhost\nbasicConstraints = critical,CA:FALSE\n")?;
    let sign = ["x509", "-req", "-in", REQUEST, "-CA", AUTHORITY, "-CAkey", AUTHORITY_KEY, "-CAcreateserial"];
    openssl(folder, &[&sign[..], &["-days", "30", "-extfile", EXTENSIONS, "-out", CERTIFICATE]].concat())
}

/// What lets the server use them.
pub(super) fn settings() -> [(String, String); 3] {
    [("ssl", "on"), ("ssl_cert_file", CERTIFICATE), ("ssl_key_file", KEY)]
        .map(|(name, value)| (name.into(), value.into()))
}

pub(super) fn authority(folder: &Folder) -> PathBuf {
    folder.data().join(AUTHORITY)
}

fn openssl(folder: &Folder, arguments: &[&str]) -> Result<()> {
    let mut command = folder.command(Path::new("openssl"));
    command.args(arguments).current_dir(folder.data());
    run(command).map(drop).context("no certificate could be made; is `openssl` there? (`apt-get install -y openssl`)")
}
