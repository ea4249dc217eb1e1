use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::Failure;
use pillarbox::sink::{Batch, BoxFuture, CLOUD_EVENT_START, CloudEvents, Outcome, Sink, SinkFeatures};

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::config::{SinkConfig, yes};
use crate::lines::{Cancelled, deliver_whole, lines_of};

/// Appends CloudEvents to a file, one JSON object per line, one write per batch.
///
/// Several relays may append to one file: each batch is written under an exclusive lock of the file. A line that a killed
/// process left unfinished is cut under that lock before the next append; a last line that lacks nothing but its line break,
/// or that no relay wrote, is never touched but ended with one. `Delivered` means that the batch is on the disk, unless [`FileSink::fsync`] was
/// turned off. A file that was moved away (log rotation) is opened again under its path.
#[derive(Debug)]
pub struct FileSink {
    format: CloudEvents,
    target: Arc<Target>,
}

/// What a user writes for a [`FileSink`].
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileConfig {
    /// The file that is appended to.
    pub path: PathBuf,
    /// Whether each batch is flushed to the disk before it counts as delivered. Default: true.
    #[serde(default = "yes")]
    pub fsync: bool,
}

impl SinkConfig for FileConfig {
    fn required() -> &'static [(&'static str, &'static str)] {
        &[("path", "out.ndjson")]
    }

    fn build(&self, source: String) -> pillarbox::Result<Arc<dyn Sink>> {
        Ok(Arc::new(FileSink::new(&self.path, source).fsync(self.fsync)))
    }
}

/// How long another process may hold the file's lock before the sink is considered down.
pub const LOCK_WAIT_MAX: Duration = Duration::from_secs(5);

/// How far back a torn line is looked for; no line is longer.
pub const TAIL_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// The mode of a new file, less what the umask takes away.
#[cfg(unix)]
const FILE_MODE: u32 = 0o640;

/// The bits of a folder in which all users may create files, and none may remove those of others.
#[cfg(unix)]
const SHARED_FOLDER: u32 = 0o1002;

const LOCK_RETRY_MIN: Duration = Duration::from_micros(100);
const LOCK_RETRY_MAX: Duration = Duration::from_millis(5);
/// How often the file may be moved away while one batch waits for its lock.
const REOPEN_MAX: usize = 8;
const TAIL_BLOCK: u64 = 64 * 1024;

impl FileSink {
    /// A sink that appends to `path` events of this `source`, a URI like `urn:pillarbox:<log_id>`.
    pub fn new(path: impl Into<PathBuf>, source: impl Into<String>) -> Self {
        let target = Target { path: path.into(), fsync: true, file: Mutex::new(None) };
        FileSink { format: CloudEvents::new(source), target: Arc::new(target) }
    }

    /// Whether each batch is flushed to the disk before it counts as delivered. Default: true.
    pub fn fsync(self, fsync: bool) -> Self {
        let target = Target { path: self.target.path.clone(), fsync, file: Mutex::new(None) };
        FileSink { target: Arc::new(target), ..self }
    }
}

impl Sink for FileSink {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            let lines = lines_of(&self.format, &batch);
            let target = self.target.clone();
            deliver_whole(&batch, move |cancelled| target.append(&lines, cancelled)).await
        })
    }

    /// Looks without making the file.
    fn check(&self) -> BoxFuture<'_, Result<(), Failure>> {
        let target = self.target.clone();
        Box::pin(async move {
            // A directory on a network may take long to answer.
            let looked = tokio::task::spawn_blocking(move || target.check()).await;
            looked.unwrap_or_else(|error| Err(Failure::sink(format!("could not look at the file: {error}"))))
        })
    }
}

#[derive(Debug)]
struct Target {
    path: PathBuf,
    fsync: bool,
    /// Open since the last batch; one batch of this sink writes at a time.
    file: Mutex<Option<File>>,
}

impl Target {
    fn append(&self, lines: &[u8], cancelled: &Cancelled) -> Result<(), Failure> {
        // A panic in here leaves at worst a torn line, which the next append cuts.
        let mut slot = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = self.locked(slot.take(), cancelled)?;
        let written = self.write(&mut file, lines);
        file.unlock().map_err(|error| self.failure("unlock", &error))?;
        if written.is_ok() {
            *slot = Some(file);
        }
        written.map_err(|error| self.failure("write to", &error))
    }

    /// The file that is at the path now, with its lock held.
    fn locked(&self, mut open: Option<File>, cancelled: &Cancelled) -> Result<File, Failure> {
        for _ in 0..REOPEN_MAX {
            let file = match open.take() {
                Some(file) => file,
                None => self.open()?,
            };
            self.lock(&file, cancelled)?;
            // Only under the lock is it certain: the file may have been moved away while we waited.
            if is_at(&file, &self.path) {
                return Ok(file);
            }
        }
        let message = format!("'{}' is moved away again and again; look at what rotates it", self.path.display());
        Err(Failure { kind: "file", ..Failure::sink(message) })
    }

    fn open(&self) -> Result<File, Failure> {
        let is_there = self.is_there()?;
        let file = self.options().create(true).open(&self.path);
        let file = file.map_err(|error| self.failure("open", &error))?;
        if !is_there && self.fsync {
            sync_directory(self.parent()).map_err(|error| self.failure("create", &error))?;
        }
        Ok(file)
    }

    fn check(&self) -> Result<(), Failure> {
        if self.is_there()? {
            let file = self.options().open(&self.path);
            file.map_err(|error| self.failure("open", &error))?;
        }
        Ok(())
    }

    /// A new file is for its owner and group: it holds payloads. In a folder where all users may create files, as `/tmp` is, a link of
    /// another user is not followed.
    #[cfg(unix)]
    fn options(&self) -> OpenOptions {
        use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
        let mut options = OpenOptions::new();
        options.read(true).append(true).mode(FILE_MODE);
        let shared = |metadata: fs::Metadata| metadata.mode() & SHARED_FOLDER == SHARED_FOLDER;
        if fs::metadata(self.parent()).is_ok_and(shared) {
            options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
        }
        options
    }

    #[cfg(not(unix))]
    fn options(&self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).append(true);
        options
    }

    fn parent(&self) -> &Path {
        self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// Whether the file is there; fails where none can be.
    fn is_there(&self) -> Result<bool, Failure> {
        let parent = self.parent();
        if !parent.is_dir() {
            let message = format!(
                "'{}' cannot be written: the directory '{}' does not exist; create it, or change the sink's path",
                self.path.display(),
                parent.display()
            );
            return Err(Failure { kind: "file", ..Failure::sink(message) });
        }
        let found = fs::metadata(&self.path);
        if found.as_ref().is_ok_and(|metadata| !metadata.is_file()) {
            let message = format!("'{}' is not a regular file; use kind = \"stdout\" for a pipe", self.path.display());
            return Err(Failure { kind: "file", ..Failure::sink(message) });
        }
        Ok(found.is_ok())
    }

    /// Waits for the lock, but not for ever: a frozen process may hold it.
    fn lock(&self, file: &File, cancelled: &Cancelled) -> Result<(), Failure> {
        let began = Instant::now();
        let mut wait = LOCK_RETRY_MIN;
        loop {
            cancelled.check()?;
            match file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::Error(error)) => return Err(self.failure("lock", &error)),
                Err(TryLockError::WouldBlock) if began.elapsed() > LOCK_WAIT_MAX => {
                    let message = format!(
                        "'{}' has been locked by another process for more than {} s; see which with `fuser`",
                        self.path.display(),
                        LOCK_WAIT_MAX.as_secs()
                    );
                    return Err(Failure { kind: "locked", ..Failure::sink(message) });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(wait),
            }
            wait = (wait * 2).min(LOCK_RETRY_MAX);
        }
    }

    /// Appends all lines or none of them; the lock is held.
    fn write(&self, file: &mut File, lines: &[u8]) -> io::Result<()> {
        let end = mend_tail(file)?;
        let sync = |file: &File| if self.fsync { file.sync_data() } else { Ok(()) };
        let written = file.write_all(lines).and_then(|()| sync(file));
        if written.is_err() {
            // Best effort: where this fails too, the next append finds the torn line.
            let _ = file.set_len(end);
        }
        written
    }

    fn failure(&self, verb: &str, error: &io::Error) -> Failure {
        let (kind, hint) = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ("disk_full", "; make room there; it is tried again"),
            // It was opened without following links.
            _ if fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.is_symlink()) => (
                "file",
                "; it is a link in a folder in which every user may create one: let the sink's path name the file itself",
            ),
            ErrorKind::PermissionDenied => ("file", "; let the relay's user write there"),
            ErrorKind::ReadOnlyFilesystem => ("file", "; mount it writable, or change the sink's path"),
            _ => ("file", ""),
        };
        Failure { kind, ..Failure::sink(format!("cannot {verb} '{}': {error}{hint}", self.path.display())) }
    }
}

/// Cuts a torn last line, or ends a last line that is whole or not ours; where the next line begins.
fn mend_tail(file: &mut File) -> io::Result<u64> {
    let length = file.metadata()?.len();
    if length == 0 || read_at(file, length - 1, 1)? == b"\n" {
        return Ok(length);
    }
    let start = last_line_start(file, length)?;
    let begin = CLOUD_EVENT_START.as_bytes();
    let torn = match start {
        Some(start) => {
            let head = read_at(file, start, (length - start).min(begin.len() as u64))?;
            // Zeroes are what a power failure leaves of a write whose length alone reached the disk.
            head.iter().all(|byte| *byte == 0) || (begin.starts_with(&head) && !is_whole(file, start, length)?)
        }
        None => false,
    };
    match start {
        Some(start) if torn => {
            file.set_len(start)?;
            Ok(start)
        }
        _ => {
            file.write_all(b"\n")?;
            Ok(length + 1)
        }
    }
}

/// Whether what stands there is a JSON value with nothing missing: then only its line break is, and it was delivered.
fn is_whole(file: &mut File, start: u64, end: u64) -> io::Result<bool> {
    let line = read_at(file, start, end - start)?;
    Ok(serde_json::from_slice::<IgnoredAny>(&line).is_ok())
}

/// Where the line at the end of the file begins; None if that is too far back to be one of ours.
fn last_line_start(file: &mut File, length: u64) -> io::Result<Option<u64>> {
    let lowest = length.saturating_sub(TAIL_BYTES_MAX);
    let mut end = length;
    while end > lowest {
        let start = end.saturating_sub(TAIL_BLOCK).max(lowest);
        let block = read_at(file, start, end - start)?;
        if let Some(at) = block.iter().rposition(|byte| *byte == b'\n') {
            return Ok(Some(start + at as u64 + 1));
        }
        end = start;
    }
    Ok((lowest == 0).then_some(0))
}

fn read_at(file: &mut File, start: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length as usize);
    file.seek(SeekFrom::Start(start))?;
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(there)) => identity(open) == identity(there),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_at(_file: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(unix)]
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(not(unix))]
fn sync_directory(_path: &Path) -> io::Result<()> {
    Ok(())
}
