use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use super::document;

/// Guards every page that shows or changes events: a page of a stranger, open in an operator's browser, could let its own name lead to this
/// address and read the answers (DNS rebinding). Probes and scrapers, who may use any name, ask for the open pages alone.
pub(super) async fn own(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    if host.is_some_and(is_own) {
        return next.run(request).await;
    }
    let detail = "this page answers only to an address or to localhost in the header Host, not to other names";
    document(StatusCode::MISDIRECTED_REQUEST, "misdirected request", detail)
}

/// Whether no name server had a say in it.
fn is_own(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_stranger_can_own_are_not_ours() {
        for host in ["localhost", "LOCALHOST:7070", "127.0.0.1:7070", "10.0.0.5", "[::1]:7070", "[fe80::1]"] {
            assert!(is_own(host), "{host}");
        }
        for host in ["evil.example", "evil.example:7070", "127.0.0.1.evil.example", "localhost.evil.example", "", "[x]"]
        {
            assert!(!is_own(host), "{host}");
        }
    }
}
