use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Resolves names to public addresses alone. It is asked for every connection, so a name that changes its address later is
/// judged again.
pub(super) struct PublicOnly<L = fn(&str) -> io::Result<Vec<SocketAddr>>> {
    look_up: L,
}

/// A name has no public address.
#[derive(Debug)]
pub(super) struct Blocked;

impl PublicOnly {
    pub(super) fn new() -> Self {
        PublicOnly { look_up: |name| Ok((name, 0).to_socket_addrs()?.collect()) }
    }
}

impl<L> Resolve for PublicOnly<L>
where
    L: Fn(&str) -> io::Result<Vec<SocketAddr>> + Copy + Send + Sync + 'static,
{
    fn resolve(&self, name: Name) -> Resolving {
        let look_up = self.look_up;
        Box::pin(async move {
            let found = tokio::task::spawn_blocking(move || look_up(name.as_str())).await??;
            let public: Vec<SocketAddr> = found.into_iter().filter(|address| is_public(address.ip())).collect();
            if public.is_empty() {
                return Err(Blocked.into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name has no public address")
    }
}

impl std::error::Error for Blocked {}

/// Whether an address belongs to the public internet, by the registries of special addresses of IANA.
pub(super) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let special = match address.octets() {
        [0 | 10 | 127, ..] => true,
        // Shared by carriers and their customers.
        [100, second, ..] => (64..128).contains(&second),
        // Link-local, with the metadata services of the clouds.
        [169, 254, ..] => true,
        [172, second, ..] => (16..32).contains(&second),
        [192, 0, 0 | 2, _] | [192, 88, 99, _] | [192, 168, ..] => true,
        [198, 18 | 19, ..] | [198, 51, 100, _] | [203, 0, 113, _] => true,
        // Azure's hosts answer their guests there, though the address is a public one.
        [168, 63, 129, 16] => true,
        // Multicast, reserved, broadcast.
        [first, ..] => first >= 224,
    };
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    match address.segments() {
        // An IPv4 address behind NAT64.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            is_public_v4(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
        }
        // Protocol assignments (Teredo and others), documentation, 6to4.
        [0x2001, second, ..] => second >= 0x200 && second != 0xdb8,
        [0x2002, ..] => false,
        [0x3fff, second, ..] => second >= 0x1000,
        // Nothing else is global unicast: not mapped IPv4, not unique local, not link-local, not multicast.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_addresses_are_not_public() {
        for address in [
            "0.0.0.0",
            "10.0.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.255",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::8.8.8.8",
            "100::1",
            "2001::1",
            "2001:1ff::1",
            "2001:db8::1",
            "2002:a00:1::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn their_neighbours_are() {
        for address in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.1",
            "100.63.255.255",
            "100.128.0.1",
            "126.255.255.255",
            "128.0.0.1",
            "168.63.129.17",
            "169.253.255.255",
            "172.15.255.255",
            "172.32.0.1",
            "192.0.1.1",
            "192.167.255.255",
            "198.17.255.255",
            "198.20.0.1",
            "223.255.255.255",
            "64:ff9b::8.8.8.8",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2606:4700::1111",
            "3fff:1000::1",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[tokio::test]
    async fn a_name_keeps_its_public_addresses_and_is_judged_each_time() {
        fn look_up(name: &str) -> io::Result<Vec<SocketAddr>> {
            let public = SocketAddr::from(([1, 1, 1, 1], 0));
            let private = SocketAddr::from(([127, 0, 0, 1], 0));
            Ok(if name == "mixed" { vec![private, public] } else { vec![private] })
        }
        let resolver = PublicOnly { look_up };
        let found: Vec<SocketAddr> = resolver.resolve("mixed".parse().unwrap()).await.unwrap().collect();
        assert_eq!(found, [SocketAddr::from(([1, 1, 1, 1], 0))]);
        let error = resolver.resolve("rebound".parse().unwrap()).await.err().unwrap();
        assert!(error.is::<Blocked>(), "{error}");
    }
}
