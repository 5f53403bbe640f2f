//! A request, as far as rules ask about it.
//!
//! Nothing is looked up before a rule wants it, and what several rules want only once: each look-up is a call of the
//! proxy. Invariant: what is asked here is in its one documented form: the path by [`path::normal`], the host in lower
//! case without its port, a repeated header as its lines joined by commas.

use std::cell::OnceCell;
use std::net::IpAddr;

use crate::client_ip::ClientIp;
use crate::path;

/// Where the facts of a request come from.
pub trait Facts {
    /// A header by its name in lower case, its lines joined by `,` in their order. `None` where it is not there.
    fn header(&self, name: &str) -> Option<Vec<u8>>;

    /// A property of the proxy by its path, such as `["source", "address"]`. `None` where it is not there.
    fn property(&self, path: &[&str]) -> Option<Vec<u8>>;
}

/// A request and what has been looked up of it.
pub struct Request<'a> {
    facts: &'a dyn Facts,
    client_ip: &'a ClientIp,
    address: OnceCell<Option<IpAddr>>,
    path: OnceCell<String>,
    host: OnceCell<String>,
    method: OnceCell<Vec<u8>>,
}

impl<'a> Request<'a> {
    /// A request of which nothing has been looked up.
    pub const fn new(facts: &'a dyn Facts, client_ip: &'a ClientIp) -> Self {
        Self {
            facts,
            client_ip,
            address: OnceCell::new(),
            path: OnceCell::new(),
            host: OnceCell::new(),
            method: OnceCell::new(),
        }
    }

    /// The client's address, whole. `None` where the peer has none and is believed in none.
    pub fn address(&self) -> Option<IpAddr> {
        *self.address.get_or_init(|| {
            let forwarded = if self.client_ip.needs_forwarded_for() { self.header("x-forwarded-for") } else { None };
            let source = || self.facts.property(&["source", "address"]).unwrap_or_default();
            self.client_ip.address(source, forwarded.as_deref())
        })
    }

    /// The path in its normal form. Empty where there is none.
    pub fn path(&self) -> &str {
        self.path.get_or_init(|| path::normal(&self.header(":path").unwrap_or_default()))
    }

    /// The host in lower case without its port. What of it is no visible ASCII is left out.
    pub fn host(&self) -> &str {
        self.host.get_or_init(|| host(&self.header(":authority").unwrap_or_default()))
    }

    /// The method as it was sent.
    pub fn method(&self) -> &[u8] {
        self.method.get_or_init(|| self.header(":method").unwrap_or_default())
    }

    /// A header by its name in lower case.
    pub fn header(&self, name: &str) -> Option<Vec<u8>> {
        self.facts.header(name)
    }

    /// The name of the route that the proxy chose. `None` where it has none.
    pub fn route(&self) -> Option<Vec<u8>> {
        self.property(&["xds", "route_name"])
    }

    /// A property of the proxy by its path.
    pub fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
        self.facts.property(path)
    }

    /// Whether this is a browser's question before a request to another origin (the CORS protocol of the Fetch
    /// standard), which carries no credentials and does nothing.
    pub fn is_cors_preflight(&self) -> bool {
        self.method() == b"OPTIONS"
            && self.header("origin").is_some()
            && self.header("access-control-request-method").is_some()
    }
}

/// The host of an authority: without user information, port and final dot, in lower case.
pub fn host(authority: &[u8]) -> String {
    let visible = authority.iter().filter(|byte| byte.is_ascii_graphic());
    let text = visible.map(|byte| char::from(byte.to_ascii_lowercase())).collect::<String>();
    let host = text.rsplit_once('@').map_or(text.as_str(), |(_, host)| host);
    // The colons of an IPv6 address are inside brackets.
    let host = match host.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => host,
    };
    host.strip_suffix('.').unwrap_or(host).to_owned()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A request in a table, which remembers what was asked.
    #[derive(Default, Debug)]
    pub struct Told {
        pub headers: Vec<(&'static str, Vec<u8>)>,
        pub properties: Vec<(&'static str, Vec<u8>)>,
        pub asked: RefCell<Vec<String>>,
    }

    impl Told {
        /// A request of these headers from 192.0.2.1.
        pub fn new(headers: &[(&'static str, &str)]) -> Self {
            let headers = headers.iter().map(|(name, value)| (*name, value.as_bytes().to_vec())).collect();
            Self { headers, ..Self::from(b"192.0.2.1:4711") }
        }

        /// A request without headers from there.
        pub fn from(address: &[u8]) -> Self {
            Self { properties: vec![("source.address", address.to_vec())], ..Self::default() }
        }
    }

    impl Facts for Told {
        fn header(&self, name: &str) -> Option<Vec<u8>> {
            self.asked.borrow_mut().push(name.to_owned());
            let lines = self.headers.iter().filter(|(other, _)| *other == name).map(|(_, value)| value.clone());
            let lines = lines.collect::<Vec<_>>();
            (!lines.is_empty()).then(|| lines.join(b",".as_slice()))
        }

        fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
            let path = path.join(".");
            let found = self.properties.iter().find(|(other, _)| *other == path).map(|(_, value)| value.clone());
            self.asked.borrow_mut().push(path);
            found
        }
    }

    #[test]
    fn a_host_has_one_form() {
        let cases: &[(&[u8], &str)] = &[
            (b"Example.COM", "example.com"),
            (b"example.com:8080", "example.com"),
            (b"example.com.", "example.com"),
            (b"user@example.com:1", "example.com"),
            (b"[2001:db8::1]:443", "[2001:db8::1]"),
            (b"[2001:DB8::1]", "[2001:db8::1]"),
            (b"192.0.2.1:80", "192.0.2.1"),
            (b"", ""),
            (b"\xff\xfeexample.com \r\n", "example.com"),
        ];
        for (authority, expected) in cases {
            assert_eq!(host(authority), *expected, "{}", authority.escape_ascii());
        }
    }

    #[test]
    fn nothing_is_looked_up_unasked_and_nothing_twice() {
        let told = Told::new(&[(":path", "/a?b"), (":method", "GET")]);
        let client_ip = ClientIp::default();
        let request = Request::new(&told, &client_ip);
        assert!(told.asked.borrow().is_empty());
        for _ in 0..3 {
            assert_eq!((request.path(), request.method()), ("/a", b"GET".as_slice()));
            assert!(request.address().is_some());
        }
        assert_eq!(*told.asked.borrow(), [":path", ":method", "source.address"]);
    }
}
