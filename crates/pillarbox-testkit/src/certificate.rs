use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The certificate of the authority.
pub(crate) const AUTHORITY: &str = "authority.crt";
/// The server's certificate, for the name `localhost`.
pub(crate) const CERTIFICATE: &str = "server.crt";
/// The server's key.
pub(crate) const KEY: &str = "server.key";

const AUTHORITY_KEY: &str = "authority.key";
const REQUEST: &str = "server.csr";
const EXTENSIONS: &str = "server.ext";

/// A fresh key of a kind that is quick to make.
const NEW_KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

/// Makes an authority and a certificate for `localhost` that it has signed, as files of this folder. `openssl` is the command without
/// arguments, run by whom the files are to belong to.
pub(crate) fn make(folder: &Path, openssl: impl Fn() -> Command) -> Result<()> {
    let extensions = folder.join(EXTENSIONS);
    std::fs::write(&extensions, "subjectAltName = DNS:localhost\nbasicConstraints = critical,CA:FALSE\n")
        .with_context(|| format!("cannot write {}", extensions.display()))?;
    let run = |arguments: &[&[&str]]| {
        let output = openssl().args(arguments.concat()).current_dir(folder).output();
        let output =
            output.context("no certificate could be made; is `openssl` there? (`apt-get install -y openssl`)")?;
        ensure!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    let authority = ["req", "-x509", "-subj", "/CN=Pillarbox test authority", "-days", "30"];
    let signs = ["-addext", "keyUsage=critical,keyCertSign", "-keyout", AUTHORITY_KEY, "-out", AUTHORITY];
    run(&[&authority, &NEW_KEY, &signs])?;
    run(&[&["req", "-subj", "/CN=localhost", "-keyout", KEY, "-out", REQUEST], &NEW_KEY])?;
    let sign = ["x509", "-req", "-in", REQUEST, "-CA", AUTHORITY, "-CAkey", AUTHORITY_KEY, "-CAcreateserial"];
    run(&[&sign, &["-days", "30", "-extfile", EXTENSIONS, "-out", CERTIFICATE]])
}
