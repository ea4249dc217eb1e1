use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pillarbox::{Error, ErrorKind, Result};

use super::decode;

/// Where the sockets of a server on this machine are, as the packages of the distributions and PostgreSQL itself lay them.
const SOCKET_FOLDERS: [&str; 3] = ["/run/postgresql", "/var/run/postgresql", "/tmp"];

/// The longest service or password file that is read.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// What libpq adds to a connection string: a service, the environment, a password file. In this order, and only where the string says
/// nothing itself.
pub(super) struct Surroundings<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
    /// Whether a server's socket is there.
    is_socket: &'a dyn Fn(&Path) -> bool,
}

/// The settings that are looked for, with their variables.
const VARIABLES: [(&str, &str); 12] = [
    ("host", "PGHOST"),
    ("hostaddr", "PGHOSTADDR"),
    ("port", "PGPORT"),
    ("dbname", "PGDATABASE"),
    ("user", "PGUSER"),
    ("password", "PGPASSWORD"),
    ("options", "PGOPTIONS"),
    ("sslmode", "PGSSLMODE"),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
    ("target_session_attrs", "PGTARGETSESSIONATTRS"),
    ("channel_binding", "PGCHANNELBINDING"),
];

/// The parts of a URL, each as it is written there.
struct Parts {
    credentials: Option<String>,
    hosts: String,
    database: String,
    /// Names and values, decoded.
    parameters: Vec<(String, String)>,
}

/// A URL that leaves nothing out, without the parameters that only this crate reads.
pub(super) struct Completed {
    pub(super) url: String,
    /// Those: `schema`, `sslmode`, `sslrootcert`.
    pub(super) own: BTreeMap<String, String>,
    pub(super) passfile: Option<PathBuf>,
}

impl Surroundings<'static> {
    /// Those of this process.
    pub(super) fn of_process() -> Self {
        Surroundings {
            variable: &|name| std::env::var(name).ok().filter(|value| !value.is_empty()),
            is_socket: &|path| path.exists(),
        }
    }
}

impl Surroundings<'_> {
    /// Fills in what the URL leaves out.
    pub(super) fn complete(&self, url: &str) -> Result<Completed> {
        let mut parts = Parts::of(url)?;
        let service = parts.take("service").or_else(|| (self.variable)("PGSERVICE"));
        let mut settings = match service {
            Some(name) => self.service(&name)?,
            None => BTreeMap::new(),
        };
        for (setting, name) in VARIABLES {
            if let (false, Some(value)) = (settings.contains_key(setting), (self.variable)(name)) {
                settings.insert(setting.to_owned(), value);
            }
        }
        let passfile = parts.take("passfile").or_else(|| settings.remove("passfile"));
        let passfile = passfile.or_else(|| (self.variable)("PGPASSFILE")).map(PathBuf::from);
        let mut own = BTreeMap::new();
        for name in ["schema", "sslmode", "sslrootcert"] {
            if let Some(value) = parts.take(name).or_else(|| settings.remove(name)) {
                own.insert(name.to_owned(), value);
            }
        }
        self.fill_in(&mut parts, settings)?;
        let passfile = passfile.or_else(|| Some(self.home()?.join(".pgpass")));
        Ok(Completed { url: parts.url(), own, passfile })
    }

    fn fill_in(&self, parts: &mut Parts, mut settings: BTreeMap<String, String>) -> Result<()> {
        let port = parts.take("port").or_else(|| settings.remove("port"));
        let ports: Vec<String> =
            port.iter().flat_map(|ports| ports.split(',')).map(|port| port.trim().to_owned()).collect();
        if let Some(wrong) = ports.iter().find(|port| port.parse::<u16>().is_err()) {
            return Err(invalid(format!("'{wrong}' is not a port; see the URL's `port`, PGPORT and the service file")));
        }
        let host = parts.take("host").or_else(|| settings.remove("host"));
        let has_address = parts.has("hostaddr") || settings.contains_key("hostaddr");
        if parts.hosts.is_empty() && !(has_address && host.is_none()) {
            let first = ports.first().map_or("5432", String::as_str);
            let host = host.unwrap_or_else(|| self.own_host(first));
            parts.hosts = host.split(',').map(written_host).collect::<Vec<_>>().join(",");
        }
        parts.hosts = with_ports(&parts.hosts, &ports);
        if parts.hosts.is_empty() && !ports.is_empty() {
            parts.parameters.push(("port".to_owned(), ports.join(",")));
        }
        let named = |parts: &Parts, name: &str| match name {
            "user" => parts.credentials.is_some(),
            "password" => parts.credentials.as_ref().is_some_and(|it| it.contains(':')),
            "dbname" => !parts.database.is_empty(),
            _ => false,
        };
        for (name, value) in settings {
            // A service may say more than a relay has any use for, as `application_name`.
            let known = VARIABLES.iter().any(|(setting, _)| *setting == name);
            if known && !parts.has(&name) && !named(parts, &name) {
                parts.parameters.push((name, value));
            }
        }
        // The client knows two of libpq's names for it; whoever wants the primary wants to write.
        let attributes = parts.parameters.iter_mut().filter(|(name, _)| name == "target_session_attrs");
        attributes.filter(|(_, value)| value == "primary").for_each(|(_, value)| *value = "read-write".to_owned());
        Ok(())
    }

    /// The server of this machine: by its socket if there is one.
    fn own_host(&self, port: &str) -> String {
        let has_socket = |folder: &&&str| (self.is_socket)(&Path::new(folder).join(format!(".s.PGSQL.{port}")));
        SOCKET_FOLDERS.iter().find(has_socket).map_or("localhost", |folder| folder).to_owned()
    }

    fn home(&self) -> Option<PathBuf> {
        (self.variable)("HOME").map(PathBuf::from)
    }

    /// What the service files say of a service: the user's own first, then the machine's.
    fn service(&self, name: &str) -> Result<BTreeMap<String, String>> {
        let own = (self.variable)("PGSERVICEFILE").map(PathBuf::from);
        let own = own.or_else(|| Some(self.home()?.join(".pg_service.conf")));
        let machine = (self.variable)("PGSYSCONFDIR").map(|folder| Path::new(&folder).join("pg_service.conf"));
        for file in own.into_iter().chain(machine) {
            if let Some(settings) = read(&file).and_then(|text| section(&text, name)) {
                return Ok(settings);
            }
        }
        Err(invalid(format!(
            "there is no service '{name}'; define it in ~/.pg_service.conf or the file that PGSERVICEFILE names"
        )))
    }
}

impl Parts {
    fn of(url: &str) -> Result<Self> {
        let (_, rest) = url.split_once("://").unwrap_or(("", url));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (server, database) = place.split_once('/').unwrap_or((place, ""));
        let (credentials, hosts) = match server.split_once('@') {
            Some((credentials, hosts)) => (Some(credentials.to_owned()), hosts),
            None => (None, server),
        };
        // Nothing of it may be shown: it is a part of the password.
        if hosts.contains('@') || database.contains('@') {
            return Err(invalid(
                "the database URL has an @ that does not end the password; write @ in the user, the password or the database as \
                 %40, and / as %2F"
                    .to_owned(),
            ));
        }
        let parameter = |text: &str| {
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            (decode(name), decode(value))
        };
        let parameters = query.split('&').filter(|text| !text.is_empty()).map(parameter).collect();
        Ok(Parts { credentials, hosts: hosts.to_owned(), database: database.to_owned(), parameters })
    }

    fn has(&self, name: &str) -> bool {
        self.parameters.iter().any(|(known, _)| known == name)
    }

    /// The last value of a parameter, which is not one any more.
    fn take(&mut self, name: &str) -> Option<String> {
        let found = self.parameters.iter().rfind(|(known, _)| known == name).map(|(_, value)| value.clone());
        self.parameters.retain(|(known, _)| known != name);
        found
    }

    fn url(&self) -> String {
        let credentials = self.credentials.as_ref().map(|text| format!("{text}@")).unwrap_or_default();
        let parameters: Vec<String> =
            self.parameters.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
        format!("postgres://{credentials}{}/{}?{}", self.hosts, self.database, parameters.join("&"))
    }
}

/// A host as a URL has it.
fn written_host(host: &str) -> String {
    match host.trim() {
        address if address.contains(':') => format!("[{address}]"),
        name => encode(name),
    }
}

/// The hosts, with ports for those that have none: one for each, or one for all.
fn with_ports(hosts: &str, ports: &[String]) -> String {
    let with_port = |(at, host): (usize, &str)| {
        let has_port = host.rsplit_once(']').map_or(host, |(_, rest)| rest).contains(':');
        match ports.get(at).or(ports.first()) {
            Some(port) if !has_port && !host.is_empty() => format!("{host}:{port}"),
            _ => host.to_owned(),
        }
    };
    hosts.split(',').enumerate().map(with_port).collect::<Vec<_>>().join(",")
}

fn encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// The settings below `[name]`.
fn section(text: &str, name: &str) -> Option<BTreeMap<String, String>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let below = lines.skip_while(|line| *line != format!("[{name}]"));
    let mut below = below.peekable();
    below.peek()?;
    let settings = below.skip(1).take_while(|line| !line.starts_with('['));
    Some(
        settings
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()))
            .collect(),
    )
}

/// The password of the first line that fits. `host` is a name, an address or the folder of a socket.
pub(super) fn password(file: &Path, host: &str, port: u16, database: &str, user: &str) -> Option<String> {
    let text = read(file)?;
    if is_open_to_others(file) {
        tracing::warn!(
            file = %file.display(),
            "the password file is not used, since others can read it; make it private with `chmod 0600`"
        );
        return None;
    }
    // The server of this machine goes by this name, whichever way it is reached.
    let host = if SOCKET_FOLDERS.contains(&host) { "localhost" } else { host };
    let port = port.to_string();
    let fits = |line: &str| {
        let fields = fields(line);
        let wanted = [host, &port, database, user];
        let [.., password] = fields.as_slice() else { return None };
        let all = fields.len() == 5 && fields.iter().zip(wanted).all(|(field, value)| field == "*" || field == value);
        all.then(|| password.clone())
    };
    text.lines().filter(|line| !line.starts_with('#')).find_map(fits)
}

/// `a:b\:c:d`, with at most five fields: the password may have colons of its own.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        let count = fields.len();
        let last = fields.last_mut().expect("there is one from the beginning");
        match character {
            '\\' => last.extend(characters.next()),
            ':' if count < 5 => fields.push(String::new()),
            other => last.push(other),
        }
    }
    fields
}

/// A file that is not there, or cannot be read, says nothing, as with libpq.
fn read(file: &Path) -> Option<String> {
    let metadata = std::fs::metadata(file).ok()?;
    if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
        return None;
    }
    std::fs::read_to_string(file).ok()
}

#[cfg(unix)]
fn is_open_to_others(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(file).is_ok_and(|metadata| metadata.permissions().mode() & 0o077 != 0)
}

#[cfg(not(unix))]
fn is_open_to_others(_: &Path) -> bool {
    false
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_SOCKET: fn(&Path) -> bool = |_| false;

    fn completed(url: &str, variables: &[(&str, &str)], is_socket: &dyn Fn(&Path) -> bool) -> Result<Completed> {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Surroundings { variable: &variable, is_socket }.complete(url)
    }

    #[track_caller]
    fn check(url: &str, variables: &[(&str, &str)], expected: &str) {
        assert_eq!(completed(url, variables, &NO_SOCKET).unwrap().url, expected);
    }

    #[test]
    fn what_a_url_says_stays() {
        let all = [("PGHOST", "x"), ("PGPORT", "1"), ("PGUSER", "x"), ("PGPASSWORD", "x"), ("PGDATABASE", "x")];
        check("postgres://u:p@h:5433/d?options=-c%20a%3Db", &all, "postgres://u:p@h:5433/d?options=-c%20a%3Db");
        let own = completed("postgres://u:p@h/d?sslmode=disable&schema=s", &[("PGSSLMODE", "require")], &NO_SOCKET);
        let own = own.unwrap().own;
        assert_eq!((own["sslmode"].as_str(), own["schema"].as_str()), ("disable", "s"));
    }

    #[test]
    fn what_it_leaves_out_comes_from_the_environment() {
        check("postgres:///app", &[], "postgres://localhost/app?");
        check("postgres:///app", &[("PGHOST", "db"), ("PGPORT", "5433")], "postgres://db:5433/app?");
        check("postgres://", &[("PGHOST", "::1"), ("PGDATABASE", "a/b")], "postgres://[::1]/?dbname=a%2Fb");
        check("postgres://h/d", &[("PGPORT", "6432"), ("PGUSER", "u@x")], "postgres://h:6432/d?user=u%40x");
        check("postgres://h:1/d", &[("PGPORT", "6432")], "postgres://h:1/d?");
        check("postgres://u@h/d", &[("PGPASSWORD", "p:@"), ("PGUSER", "x")], "postgres://u@h/d?password=p%3A%40");
        check("postgres:///d", &[("PGHOST", "a,b"), ("PGPORT", "1,2")], "postgres://a:1,b:2/d?");
        check("postgres:///d", &[("PGHOST", "/run/pg")], "postgres://%2Frun%2Fpg/d?");
        check(
            "postgres:///d",
            &[("PGHOSTADDR", "10.0.0.1"), ("PGPORT", "2")],
            "postgres:///d?port=2&hostaddr=10.0.0.1",
        );
        check(
            "postgres://h/d?channel_binding=disable",
            &[("PGTARGETSESSIONATTRS", "primary"), ("PGCHANNELBINDING", "require")],
            "postgres://h/d?channel_binding=disable&target_session_attrs=read-write",
        );
        check("postgres://h/d", &[("PGCHANNELBINDING", "require")], "postgres://h/d?channel_binding=require");
        assert!(completed("postgres:///d", &[("PGPORT", "x")], &NO_SOCKET).is_err());
    }

    #[test]
    fn a_server_of_this_machine_is_reached_by_its_socket() {
        let is_socket = |path: &Path| path == Path::new("/tmp/.s.PGSQL.5433");
        let url = completed("postgres:///d", &[("PGPORT", "5433")], &is_socket).unwrap().url;
        assert_eq!(url, "postgres://%2Ftmp:5433/d?");
    }

    #[test]
    fn a_service_comes_before_the_environment() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("services");
        let text = "# ours\n[other]\nhost=x\n\n[shop]\nhost = a,b\nuser=app\nsslmode=require\napplication_name=x\n\
                    target_session_attrs=read-write\n[later]\nport=9\n";
        std::fs::write(&file, text).unwrap();
        let variables = [
            ("PGSERVICEFILE", file.to_str().unwrap()),
            ("PGUSER", "y"),
            ("PGDATABASE", "d"),
            ("PGTARGETSESSIONATTRS", "any"),
        ];
        let found = completed("postgres://?service=shop", &variables, &NO_SOCKET).unwrap();
        assert_eq!(
            (found.url.as_str(), found.own["sslmode"].as_str()),
            ("postgres://a,b/?dbname=d&target_session_attrs=read-write&user=app", "require")
        );
        let error = completed("postgres://?service=none", &variables, &NO_SOCKET).err().unwrap().to_string();
        assert!(error.contains("no service 'none'"), "{error}");
    }

    #[test]
    fn a_password_with_an_at_sign_is_never_taken_for_a_host() {
        let urls = [
            "postgres://u:top@canary@localhost:1/app",
            "postgres://u:to@p/canary@localhost/app",
            "postgres://u:canary/p@localhost/app",
        ];
        for url in urls {
            let error = completed(url, &[], &NO_SOCKET).err().unwrap().to_string();
            assert!(error.contains("%40") && !error.contains("canary"), "{error}");
        }
        check("postgres://u:to%40p@h/d", &[], "postgres://u:to%40p@h/d?");
        check("postgres://h/d?password=top@canary", &[], "postgres://h/d?password=top%40canary");
        check("postgres:///d?password=top@canary", &[], "postgres://localhost/d?password=top%40canary");
    }

    #[cfg(unix)]
    #[test]
    fn a_password_comes_from_a_private_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pgpass");
        std::fs::write(&file, "# mine\nother:*:*:*:no\nh:5432:d:u:a\\:b\\\\c\nlocalhost:*:*:u:socket\n*:*:*:u:any\n")
            .unwrap();
        let mode = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let of = |host, port, database, user| password(&file, host, port, database, user);
        mode(0o600);
        assert_eq!(of("h", 5432, "d", "u").as_deref(), Some("a:b\\c"));
        assert_eq!(of("h", 5433, "d", "u").as_deref(), Some("any"));
        assert_eq!(of("/tmp", 5432, "d", "u").as_deref(), Some("socket"));
        assert_eq!(of("h", 5432, "d", "v"), None);
        mode(0o640);
        assert_eq!(of("h", 5432, "d", "u"), None, "others could have read it");
    }
}
