//! Whose address is the client's, and which addresses are one identity.
//!
//! Trust runs from the right: the right-most entry of x-forwarded-for was written by the proxy nearest to this one, and
//! everything left of the first entry that is not trusted can have been made up by the caller.
//!
//! Invariant: bytes of any kind are an address or none, never a fault; the work is bounded by the length of the header,
//! and nothing is allocated for it.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroUsize;

use ipnet::IpNet;

/// How the client's address is found, and how much of it counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientIp {
    /// Whose word is taken.
    pub trust: Trust,
    /// How much of an address counts.
    pub prefixes: Prefixes,
}

/// Whose word is taken for the client's address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// The proxy's own: `source.address`, found by its rules for x-forwarded-for.
    #[default]
    Proxy,
    /// The entry of x-forwarded-for with this number from the right, counted from 1.
    Hops(NonZeroUsize),
    /// The right-most entry of x-forwarded-for that is in none of these networks.
    Networks(Vec<IpNet>),
}

impl Trust {
    /// Reads an address or a network in CIDR notation. Bits beyond the prefix do not count.
    pub fn network(text: &str) -> Option<IpNet> {
        let network = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?;
        Some(match network {
            // What is written as a network of IPv4-mapped addresses is met by IPv4 addresses here.
            IpNet::V6(mapped) if mapped.prefix_len() >= 96 => match mapped.addr().to_ipv4_mapped() {
                Some(address) => {
                    let length = mapped.prefix_len().saturating_sub(96);
                    ipnet::Ipv4Net::new(address, length).map_or(network, IpNet::from).trunc()
                }
                None => network.trunc(),
            },
            other => other.trunc(),
        })
    }
}

/// How many leading bits of an address tell one identity from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefixes {
    /// Of an IPv4 address: 1 to 32.
    pub ipv4: u8,
    /// Of an IPv6 address: 1 to 128.
    pub ipv6: u8,
}

impl Default for Prefixes {
    /// A whole IPv4 address; of IPv6 the 64 bits that a provider gives one customer, who can use all addresses in it.
    fn default() -> Self {
        Self { ipv4: 32, ipv6: 64 }
    }
}

/// A client, as far as its address tells: a network, or a single address.
///
/// As text an IPv4 address is plain, and a network is in CIDR notation, canonical by RFC 5952.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Client(IpNet);

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpNet::V4(network) if network.prefix_len() == 32 => write!(f, "{}", network.addr()),
            IpNet::V6(network) if network.prefix_len() == 128 => write!(f, "{}", network.addr()),
            network => write!(f, "{network}"),
        }
    }
}

impl ClientIp {
    /// Whether x-forwarded-for has to be known.
    pub const fn needs_forwarded_for(&self) -> bool {
        !matches!(self.trust, Trust::Proxy)
    }

    /// The address of a request's client, whole: `source_address` is what the proxy calls `source.address`, asked only
    /// where it counts; `forwarded_for` is x-forwarded-for with its lines joined by commas in their order. `None` where
    /// neither gives an address.
    pub fn address(&self, source_address: impl FnOnce() -> Vec<u8>, forwarded_for: Option<&[u8]>) -> Option<IpAddr> {
        let forwarded = forwarded_for.and_then(|header| self.forwarded(header));
        forwarded.or_else(|| address(&source_address()))
    }

    /// Whom an address belongs to: all addresses of its network, as far as the prefixes say.
    pub fn identity(&self, address: IpAddr) -> Option<Client> {
        let length = if address.is_ipv4() { self.prefixes.ipv4 } else { self.prefixes.ipv6 };
        IpNet::new(address, length).ok().map(|network| Client(network.trunc()))
    }

    fn forwarded(&self, header: &[u8]) -> Option<IpAddr> {
        let mut entries = header.rsplit(|byte| *byte == b',');
        match &self.trust {
            Trust::Proxy => None,
            Trust::Hops(hops) => entries.nth(hops.get().saturating_sub(1)).and_then(address),
            Trust::Networks(networks) => {
                for entry in entries {
                    // What is no address was not written by a proxy of ours; nothing left of it is worth more.
                    let address = address(entry)?;
                    if !networks.iter().any(|network| network.contains(&address)) {
                        return Some(address);
                    }
                }
                None
            }
        }
    }
}

/// Reads an address, with a port or without, IPv6 in brackets or without, with blanks around it. An IPv4 address that is
/// mapped into IPv6 is the IPv4 address; the zone of a link-local address (`%eth0`) means nothing elsewhere and is left
/// out.
fn address(bytes: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(bytes.trim_ascii()).ok()?;
    let host = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            let port_is_right = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
            Some(host).filter(|host| port_is_right && host.contains(':'))?
        }
        // An IPv6 address has more colons than the one before a port.
        None => match text.split_once(':') {
            Some((host, port)) if is_port(port) => Some(host).filter(|host| !host.is_empty())?,
            _ => text,
        },
    };
    let address = match host.split_once('%') {
        Some((host, _)) => IpAddr::V6(host.parse::<Ipv6Addr>().ok()?),
        None => host.parse::<IpAddr>().ok()?,
    };
    Some(match address {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        v4 => v4,
    })
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hops(hops: usize) -> ClientIp {
        ClientIp { trust: Trust::Hops(NonZeroUsize::new(hops).unwrap()), ..ClientIp::default() }
    }

    fn proxies(networks: &[&str]) -> ClientIp {
        let networks = networks.iter().map(|text| Trust::network(text).unwrap()).collect();
        ClientIp { trust: Trust::Networks(networks), ..ClientIp::default() }
    }

    fn check(settings: &ClientIp, source: &str, forwarded: Option<&[u8]>, expected: &str) {
        let address = settings.address(|| source.as_bytes().to_vec(), forwarded);
        let client = address.and_then(|address| settings.identity(address)).map(|client| client.to_string());
        let header = forwarded.map(|header| header.escape_ascii().to_string());
        assert_eq!(client.as_deref().unwrap_or("nobody"), expected, "{source} {header:?}");
    }

    #[test]
    fn the_proxys_own_word_counts_without_its_port() {
        let cases = [
            ("192.0.2.1:4711", "192.0.2.1"),
            ("192.0.2.1:4712", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
            ("[2001:db8:1:2:3:4:5:6]:443", "2001:db8:1:2::/64"),
            ("[2001:db8:1:2:ffff::1]:444", "2001:db8:1:2::/64"),
            ("2001:db8::1", "2001:db8::/64"),
            ("[2001:db8::1]", "2001:db8::/64"),
            ("[::1]:9", "::/64"),
            ("[::ffff:192.0.2.1]:443", "192.0.2.1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("[fe80::1%2]:443", "fe80::/64"),
            ("fe80::1%eth0", "fe80::/64"),
            ("192.0.2.1%eth0", "nobody"),
            ("[192.0.2.1]:80", "nobody"),
            ("[2001:db8::1]x", "nobody"),
            (":80", "nobody"),
            ("::1", "::/64"),
            ("/var/run/envoy.sock", "nobody"),
            ("envoy://internal/", "nobody"),
            ("", "nobody"),
            ("192.0.2.256:1", "nobody"),
            ("192.0.2.1:99999", "nobody"),
        ];
        for (source, expected) in cases {
            check(&ClientIp::default(), source, Some(b"198.51.100.7"), expected);
        }
    }

    #[test]
    fn trusted_hops_count_from_the_right_and_what_stands_left_of_them_is_worth_nothing() {
        let peer = "10.0.0.1:4711";
        let cases: &[(usize, &[u8], &str)] = &[
            (1, b"198.51.100.7", "198.51.100.7"),
            (1, b"203.0.113.9, 198.51.100.7", "198.51.100.7"),
            (2, b"203.0.113.9, 198.51.100.7", "203.0.113.9"),
            (2, b"6.6.6.6,203.0.113.9,198.51.100.7", "203.0.113.9"),
            (2, b"\xff\xfe,,junk,203.0.113.9,198.51.100.7", "203.0.113.9"),
            (3, b"203.0.113.9, 198.51.100.7", "10.0.0.1"),
            (1, b"203.0.113.9, junk", "10.0.0.1"),
            (1, b"203.0.113.9, \xff", "10.0.0.1"),
            (1, b"203.0.113.9,", "10.0.0.1"),
            (1, b"", "10.0.0.1"),
            (1, b"203.0.113.9:1234", "203.0.113.9"),
            (1, b"[2001:db8::1]:443", "2001:db8::/64"),
            (1, b"  ::ffff:203.0.113.9\t", "203.0.113.9"),
        ];
        for (number, header, expected) in cases {
            check(&hops(*number), peer, Some(header), expected);
        }
        check(&hops(1), peer, None, "10.0.0.1");
    }

    #[test]
    fn the_right_most_entry_that_is_no_trusted_proxy_is_the_client() {
        let peer = "10.0.0.1:4711";
        let settings = proxies(&["10.0.0.0/8", "2001:db8:f::/48", "192.0.2.53", "::ffff:172.16.0.0/108"]);
        let cases: &[(&[u8], &str)] = &[
            (b"198.51.100.7", "198.51.100.7"),
            (b"6.6.6.6, 198.51.100.7, 10.1.2.3", "198.51.100.7"),
            (b"198.51.100.7, 10.1.2.3, 2001:db8:f::9, 192.0.2.53", "198.51.100.7"),
            (b"198.51.100.7, ::ffff:10.9.9.9", "198.51.100.7"),
            (b"198.51.100.7, 172.17.0.1:80", "198.51.100.7"),
            (b"198.51.100.7, 172.32.0.1", "172.32.0.1"),
            (b"10.1.2.3, 10.4.5.6", "10.0.0.1"),
            (b"198.51.100.7, junk, 10.4.5.6", "10.0.0.1"),
            (b"198.51.100.7,, 10.4.5.6", "10.0.0.1"),
            (b"", "10.0.0.1"),
        ];
        for (header, expected) in cases {
            check(&settings, peer, Some(header), expected);
        }
    }

    #[test]
    fn a_prefix_makes_its_addresses_one() {
        let prefixes = |ipv4, ipv6| ClientIp { prefixes: Prefixes { ipv4, ipv6 }, ..ClientIp::default() };
        check(&prefixes(24, 64), "192.0.2.77:1", None, "192.0.2.0/24");
        check(&prefixes(32, 128), "[2001:db8::1]:1", None, "2001:db8::1");
        check(&prefixes(32, 48), "[2001:db8:1:2::1]:1", None, "2001:db8:1::/48");
        check(&prefixes(24, 64), "[::ffff:192.0.2.77]:1", None, "192.0.2.0/24");
    }

    #[test]
    fn a_header_of_48_kilobytes_is_read_from_the_right() {
        let mut header = b"6.6.6.6,".repeat(6 * 1024);
        header.extend(b"198.51.100.7,10.0.0.9");
        check(&proxies(&["10.0.0.0/8"]), "10.0.0.1:1", Some(&header), "198.51.100.7");
        check(&hops(2), "10.0.0.1:1", Some(&header), "198.51.100.7");
    }

    proptest::proptest! {
        #[test]
        fn bytes_of_any_kind_are_an_address_or_none(source: Vec<u8>, header: Vec<u8>, number in 1..5_usize) {
            hops(number).address(|| source.clone(), Some(&header));
            proxies(&["10.0.0.0/8"]).address(|| source.clone(), Some(&header));
        }

        #[test]
        fn what_a_caller_writes_on_the_left_changes_nothing(forged: Vec<u8>) {
            let mut header = forged;
            header.extend(b",198.51.100.7,10.0.0.9");
            for settings in [hops(2), proxies(&["10.0.0.0/8"])] {
                check(&settings, "10.0.0.1:1", Some(&header), "198.51.100.7");
            }
        }
    }
}
