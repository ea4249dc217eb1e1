use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pillarbox_testkit::loopback::free_port;

/// How a [`Receiver`] treats those who connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manners {
    /// Nobody listens.
    Absent,
    /// Closes every connection.
    Closes,
    /// Answers with what no protocol knows, and closes.
    Garbage,
    /// Refuses in the client's own protocol, and repeats in the refusal what it was told, passwords too.
    Parrot,
    /// Takes what comes by HTTP.
    Takes,
}

/// A receiver on the loopback interface; it ends when the test is over.
pub(crate) struct Receiver {
    address: String,
    stopped: Arc<AtomicBool>,
    /// The bodies that came by HTTP.
    bodies: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Receiver {
    pub(crate) fn start(manners: Manners) -> Self {
        Receiver::with(free_listener(), manners)
    }

    /// The one that was absent comes, at the same address.
    pub(crate) fn come(self, manners: Manners) -> Self {
        Receiver::with(TcpListener::bind(&self.address).unwrap(), manners)
    }

    fn with(listener: TcpListener, manners: Manners) -> Self {
        let address = listener.local_addr().unwrap().to_string();
        let (stopped, bodies) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        if manners == Manners::Absent {
            return Receiver { address, stopped, bodies, thread: None };
        }
        let (seen, taken) = (stopped.clone(), bodies.clone());
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if seen.load(Ordering::Acquire) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let taken = taken.clone();
                // A client that goes away is no failure of this receiver.
                thread::spawn(move || drop(answer(stream, manners, &taken)));
            }
        });
        Receiver { address, stopped, bodies, thread: Some(thread) }
    }

    /// What it took.
    pub(crate) fn bodies(&self) -> Vec<String> {
        self.bodies.lock().unwrap().clone()
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            drop(TcpStream::connect(&self.address));
            drop(thread.join());
        }
    }
}

/// On a port that nobody takes while nobody listens there.
fn free_listener() -> TcpListener {
    let mut ports = (0..5).map(|_| free_port().unwrap());
    ports.find_map(|port| TcpListener::bind(("127.0.0.1", port)).ok()).unwrap()
}

fn answer(mut stream: TcpStream, manners: Manners, taken: &Mutex<Vec<String>>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    match manners {
        Manners::Absent | Manners::Closes => {}
        Manners::Garbage => {
            hear(&mut stream)?;
            stream.write_all(b"\x00\xffgarbage\r\n\r\n\x00")?;
        }
        Manners::Parrot => repeat(&mut stream)?,
        Manners::Takes => while take(&mut stream, taken)? {},
    }
    stream.shutdown(Shutdown::Both)
}

fn hear(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut buffer = vec![0; 65_536];
    let length = stream.read(&mut buffer)?;
    buffer.truncate(length);
    Ok(buffer)
}

/// Takes one request; false when there are no more on this connection.
fn take(stream: &mut TcpStream, taken: &Mutex<Vec<String>>) -> std::io::Result<bool> {
    let mut heard = Vec::new();
    let head = loop {
        if let Some(end) = heard.windows(4).position(|window| window == b"\r\n\r\n") {
            break String::from_utf8_lossy(&heard[..end]).to_lowercase();
        }
        match hear(stream)? {
            more if more.is_empty() => return Ok(false),
            more => heard.extend(more),
        }
    };
    let length =
        head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |text| text.parse().unwrap());
    let body = head.len() + 4;
    while heard.len() < body + length {
        heard.extend(hear(stream)?);
    }
    if head.starts_with("post") {
        taken.lock().unwrap().push(String::from_utf8(heard[body..].to_vec()).unwrap());
    }
    // As the servers of many languages' own libraries answer what nobody has written a method for.
    let is_known = !head.starts_with("options");
    let answer = if is_known { "204 Taken\r\n\r\n" } else { "501 Unknown\r\nContent-Length: 0\r\n\r\n" };
    stream.write_all(format!("HTTP/1.1 {answer}").as_bytes())?;
    Ok(true)
}

fn repeat(stream: &mut TcpStream) -> std::io::Result<()> {
    let mut heard = hear(stream)?;
    if heard.starts_with(b"*") {
        let words = String::from_utf8_lossy(&heard).replace(['\r', '\n'], " ");
        let refusal = format!("-ERR unknown command, with args beginning with: {words}\r\n");
        return stream.write_all(refusal.repeat(heard.iter().filter(|byte| **byte == b'*').count()).as_bytes());
    }
    if heard.starts_with(b"POST")
        || heard.starts_with(b"OPTIONS")
        || heard.starts_with(b"HEAD")
        || heard.starts_with(b"GET")
    {
        let body = String::from_utf8_lossy(&heard).into_owned();
        let head = format!(
            "HTTP/1.1 422 No\r\nX-Heard: {}\r\nContent-Length: {}\r\n\r\n",
            body.replace(['\r', '\n'], " "),
            body.len()
        );
        return stream.write_all(format!("{head}{body}").as_bytes());
    }
    // PostgreSQL: no TLS, then a password in clear text, please; it comes back in the error.
    if heard.get(4..8) == Some(&80_877_103u32.to_be_bytes()) {
        stream.write_all(b"N")?;
        heard = hear(stream)?;
    }
    stream.write_all(b"R\x00\x00\x00\x08\x00\x00\x00\x03")?;
    heard.extend(hear(stream)?);
    let words: Vec<u8> = heard.into_iter().filter(|byte| byte.is_ascii_graphic()).collect();
    let fields = [b"SFATAL\0C28P01\0M".as_slice(), &words, b"\0\0"].concat();
    let length = u32::try_from(fields.len() + 4).expect("short").to_be_bytes();
    stream.write_all(&[b"E".as_slice(), &length, &fields].concat())
}
