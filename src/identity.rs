//! Who a request counts as: the parts of a rule's key, as one text.
//!
//! A part that can be read in Redis without harm, and is short, stands there as it is: an address, a method, a host, a
//! path, the name of a route. The value of a header, a cookie, a query parameter or a property may be a secret, and
//! stands there as a digest only; so does whatever is long.
//!
//! Invariant: identities are injective (other parts or other values are another text), printable, without braces, and of
//! at most [`LONGEST_PART`] bytes a part. Parts are separated by `|`, which no part has in it; a digest begins with `#`,
//! which nothing else does; a part that is missing is empty, which no other is.

use sha2::{Digest, Sha256};

use crate::client_ip::ClientIp;
use crate::path;
use crate::request::{self, Request};

/// The longest text that stands for a part, in bytes.
pub const LONGEST_PART: usize = 64;

/// One part of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The client's address, or its network.
    ClientIp,
    /// The method.
    Method,
    /// The host in lower case without its port.
    Host,
    /// The path in its normal form.
    Path,
    /// The name of the route that the proxy chose.
    Route,
    /// A header by its name in lower case; several lines are joined by commas.
    Header(String),
    /// A cookie by its name; several of that name are joined by commas.
    Cookie(String),
    /// A parameter of the query by its name, decoded; several of that name are joined by commas.
    Query(String),
    /// A property of the proxy by its path.
    Property(Vec<String>),
}

/// What becomes of a request in which a part is absent, empty or blank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IfMissing {
    /// The rule does not count it.
    #[default]
    Skip,
    /// The part counts as empty, so that all such requests share a bucket.
    Share,
}

/// The key of a rule. Without any part, all requests are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The parts, in their order.
    pub parts: Vec<Part>,
    /// What becomes of a request that lacks one.
    pub if_missing: IfMissing,
}

impl Default for Identity {
    /// By client.
    fn default() -> Self {
        Self { parts: vec![Part::ClientIp], if_missing: IfMissing::default() }
    }
}

impl Identity {
    /// Who a request counts as. `None` where it lacks a part and is not to be counted.
    pub fn of(&self, request: &Request<'_>, client_ip: &ClientIp) -> Option<String> {
        let mut identity = String::new();
        for (place, part) in self.parts.iter().enumerate() {
            if place > 0 {
                identity.push('|');
            }
            match part.text(request, client_ip) {
                Some(text) => identity.push_str(&text),
                None if self.if_missing == IfMissing::Share => {}
                None => return None,
            }
        }
        Some(identity)
    }
}

impl Identity {
    /// Whom these values name, one for each part as a request would have them. `None` where there are not as many, or one
    /// of them is blank or no value of its part.
    pub fn of_values(&self, values: &[&str], client_ip: &ClientIp) -> Option<String> {
        if values.len() != self.parts.len() {
            return None;
        }
        let texts = self.parts.iter().zip(values).map(|(part, value)| part.text_of(value, client_ip));
        Some(texts.collect::<Option<Vec<_>>>()?.join("|"))
    }
}

impl Part {
    /// The text that stands for a value of this part, by the same rules as that of a request.
    fn text_of(&self, value: &str, client_ip: &ClientIp) -> Option<String> {
        let text = match self {
            Self::ClientIp => client_ip.identity(client_ip.address(|| value.as_bytes().to_vec(), None)?)?.to_string(),
            Self::Method | Self::Route => in_clear(value.as_bytes()),
            Self::Host => in_clear(request::host(value.as_bytes()).as_bytes()),
            Self::Path => short(path::normal(value.as_bytes())),
            Self::Header(_) | Self::Cookie(_) | Self::Query(_) | Self::Property(_) => digest(value.as_bytes()),
        };
        Some(text).filter(|text| !text.is_empty())
    }

    /// The text that stands for this part of a request, which is not empty. `None` where it has no such part.
    fn text(&self, request: &Request<'_>, client_ip: &ClientIp) -> Option<String> {
        let text = match self {
            Self::ClientIp => client_ip.identity(request.address()?)?.to_string(),
            Self::Method => in_clear(request.method()),
            Self::Host => in_clear(request.host().as_bytes()),
            // The normal form has no separator in it already, and stays readable.
            Self::Path => short(request.path().to_owned()),
            Self::Route => in_clear(&request.route()?),
            Self::Header(name) => digest(&request.header(name)?),
            Self::Cookie(name) => digest(&cookie(&request.header("cookie")?, name)?),
            Self::Query(name) => digest(&query(&request.header(":path")?, name)?),
            Self::Property(path) => digest(&request.property(&path.iter().map(String::as_str).collect::<Vec<_>>())?),
        };
        Some(text).filter(|text| !text.is_empty())
    }
}

/// Bytes as they are where they are harmless, and as `%XX` elsewhere. Empty where they are blank.
fn in_clear(bytes: &[u8]) -> String {
    let bytes = bytes.trim_ascii();
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~:[]".contains(byte) {
            text.push(char::from(*byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    short(text)
}

/// A text, or its digest where it is long.
fn short(text: String) -> String {
    if text.len() <= LONGEST_PART { text } else { digest(text.as_bytes()) }
}

/// What stands for bytes that are not to be read: `#` and the first half of their SHA-256. Empty where they are blank.
fn digest(bytes: &[u8]) -> String {
    let bytes = bytes.trim_ascii();
    if bytes.is_empty() {
        return String::new();
    }
    let digest = Sha256::digest(bytes);
    let mut text = String::with_capacity(33);
    text.push('#');
    for byte in digest.iter().take(16) {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The values of the cookies of a name (RFC 6265, section 4.2), joined by commas.
fn cookie(header: &[u8], name: &str) -> Option<Vec<u8>> {
    // Several lines of the header come joined by commas, which belong between cookies then.
    let pairs = header.split(|byte| matches!(byte, b';' | b','));
    joined(pairs.filter_map(|pair| {
        let (found, value) = split_once(pair.trim_ascii(), b'=')?;
        (found.trim_ascii() == name.as_bytes()).then(|| value.trim_ascii().to_vec())
    }))
}

/// The values of the parameters of a name in the query of a path (the form of HTML's URL-encoded data), joined by commas.
fn query(path: &[u8], name: &str) -> Option<Vec<u8>> {
    let (_, query) = split_once(path, b'?')?;
    let query = query.split(|byte| *byte == b'#').next().unwrap_or_default();
    joined(query.split(|byte| *byte == b'&').filter_map(|pair| {
        let (found, value) = split_once(pair, b'=').unwrap_or((pair, b""));
        (decoded(found) == name.as_bytes()).then(|| decoded(value))
    }))
}

fn joined(values: impl Iterator<Item = Vec<u8>>) -> Option<Vec<u8>> {
    let values = values.collect::<Vec<_>>();
    (!values.is_empty()).then(|| values.join(b",".as_slice()))
}

fn split_once(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let place = bytes.iter().position(|byte| *byte == at)?;
    let (head, tail) = bytes.split_at_checked(place)?;
    Some((head, tail.get(1..)?))
}

/// Text of a query without its escapes: `%XX` is a byte, `+` is a blank.
fn decoded(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        match (byte, path::escaped(after)) {
            (b'%', Some((byte, after))) => {
                bytes.push(byte);
                rest = after;
            }
            (b'+', _) => bytes.push(b' '),
            (byte, _) => bytes.push(*byte),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::request::tests::Told;

    fn identity(parts: &[Part], if_missing: IfMissing, told: &Told) -> Option<String> {
        let client_ip = ClientIp::default();
        Identity { parts: parts.to_vec(), if_missing }.of(&Request::new(told, &client_ip), &client_ip)
    }

    fn header(name: &str) -> Part {
        Part::Header(name.to_owned())
    }

    #[test]
    fn what_is_harmless_and_short_stands_in_clear() {
        let mut told =
            Told::new(&[(":method", "GET"), (":path", "//api/./orders?x=1"), (":authority", "API.example.com:8080")]);
        told.properties.push(("xds.route_name", b"check out|{x}".to_vec()));
        let cases: &[(&[Part], &str)] = &[
            (&[], ""),
            (&[Part::ClientIp], "192.0.2.1"),
            (&[Part::Method], "GET"),
            (&[Part::Host], "api.example.com"),
            (&[Part::Path], "/api/orders"),
            (&[Part::Route], "check%20out%7C%7Bx%7D"),
            (&[Part::ClientIp, Part::Method, Part::Path], "192.0.2.1|GET|/api/orders"),
        ];
        for (parts, expected) in cases {
            assert_eq!(identity(parts, IfMissing::Skip, &told).as_deref(), Some(*expected), "{parts:?}");
        }
    }

    #[test]
    fn what_may_be_a_secret_stands_as_a_digest() {
        let mut told = Told::new(&[
            (":path", "/a?token=s%65cret&x=1"),
            ("authorization", "secret"),
            ("cookie", "a=b; session=secret; c=d"),
        ]);
        told.properties.push(("metadata.tenant", b"secret".to_vec()));
        let digest = "#2bb80d537b1da3e38bd30361aa855686";
        let tenant = Part::Property(vec!["metadata".to_owned(), "tenant".to_owned()]);
        for part in [header("authorization"), Part::Cookie("session".into()), Part::Query("token".into()), tenant] {
            assert_eq!(identity(&[part], IfMissing::Skip, &told).as_deref(), Some(digest));
        }
    }

    #[test]
    fn a_part_that_is_absent_empty_or_blank_is_missing() {
        let told =
            Told::new(&[(":path", "/a?empty=&blank=+&x"), ("x-empty", ""), ("x-blank", " \t"), ("cookie", "e=; b= ")]);
        let missing = [
            header("x-absent"),
            header("x-empty"),
            header("x-blank"),
            Part::Cookie("absent".into()),
            Part::Cookie("e".into()),
            Part::Cookie("b".into()),
            Part::Query("absent".into()),
            Part::Query("empty".into()),
            Part::Query("blank".into()),
            Part::Query("x".into()),
            Part::Route,
            Part::Host,
            Part::Property(vec!["nothing".into()]),
        ];
        for part in missing {
            assert_eq!(identity(std::slice::from_ref(&part), IfMissing::Skip, &told), None, "{part:?}");
            let shared = identity(&[Part::ClientIp, part], IfMissing::Share, &told);
            assert_eq!(shared.as_deref(), Some("192.0.2.1|"));
        }
    }

    #[test]
    fn values_name_whom_a_request_with_them_would_be() {
        let mut told =
            Told::new(&[(":path", "//a/./b?q=v%31"), (":method", "GET"), (":authority", "A.example:1"), ("x", "k")]);
        told.properties.push(("xds.route_name", b"a route".to_vec()));
        let client_ip = ClientIp::default();
        let parts = vec![
            Part::ClientIp,
            Part::Method,
            Part::Host,
            Part::Path,
            Part::Route,
            header("x"),
            Part::Query("q".into()),
        ];
        let identity = Identity { parts, if_missing: IfMissing::Skip };
        let values = ["192.0.2.1", "GET", "a.EXAMPLE", "/a/b", "a route", "k", "v1"];
        let named = identity.of_values(&values, &client_ip);
        assert!(named.is_some());
        assert_eq!(named, identity.of(&Request::new(&told, &client_ip), &client_ip));
        assert_eq!(identity.of_values(&values[1..], &client_ip), None);
        let by_client = Identity::default();
        assert_eq!(by_client.of_values(&["2001:db8::9"], &client_ip).as_deref(), Some("2001:db8::/64"));
        assert_eq!(by_client.of_values(&["gateway"], &client_ip), None);
        assert_eq!(by_client.of_values(&[" "], &client_ip), None);
    }

    #[test]
    fn several_values_of_a_name_are_joined_by_commas() {
        let lines =
            Told::new(&[("x", "a"), ("x", "b"), (":path", "/?y=a&z=1&%79=b"), ("cookie", "c=a"), ("cookie", "c=b")]);
        let parts = [header("x"), Part::Query("y".into()), Part::Cookie("c".into())];
        let one = Told::new(&[("x", "a,b")]);
        let expected = identity(&[header("x")], IfMissing::Skip, &one);
        for part in parts {
            assert_eq!(identity(&[part], IfMissing::Skip, &lines), expected);
        }
    }

    #[test]
    fn a_header_of_48_kilobytes_is_a_short_part() {
        let long = "x".repeat(48 * 1024);
        let told =
            Told::new(&[("x", &long), (":path", &format!("/{long}")), (":authority", &long), (":method", &long)]);
        for part in [header("x"), Part::Path, Part::Host, Part::Method] {
            let text = identity(&[part], IfMissing::Skip, &told).unwrap();
            assert!(text.len() == 33 && text.starts_with('#'), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn other_values_are_another_identity(values in proptest::collection::hash_set(
            proptest::collection::vec(proptest::num::u8::ANY, 0..6), 2..40), count in 1..4_usize) {
            let client_ip = ClientIp::default();
            let values = values.into_iter().collect::<Vec<_>>();
            let mut seen: HashMap<String, Vec<Vec<u8>>> = HashMap::new();
            for chunk in values.windows(count) {
                let mut told = Told::from(b"192.0.2.1:1");
                for (name, value) in ["a", "b", ":method"].into_iter().zip(chunk) {
                    told.headers.push((name, value.clone()));
                }
                let parts = vec![header("a"), header("b"), Part::Method];
                let identity = Identity { parts, if_missing: IfMissing::Share };
                let text = identity.of(&Request::new(&told, &client_ip), &client_ip).unwrap();
                let printable = text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'{' && byte != b'}');
                proptest::prop_assert!(printable);
                proptest::prop_assert!(text.len() <= 3 * LONGEST_PART + 2);
                // Blanks around a value do not count.
                let meant = chunk.iter().map(|value| value.trim_ascii().to_vec()).collect::<Vec<_>>();
                let first = seen.entry(text).or_insert_with(|| meant.clone());
                proptest::prop_assert_eq!(&*first, &meant);
            }
        }

        #[test]
        fn no_bytes_are_too_strange(path: Vec<u8>, cookie: Vec<u8>) {
            let mut told = Told::from(b"");
            told.headers = vec![(":path", path), ("cookie", cookie)];
            for part in [Part::Query("a".into()), Part::Cookie("a".into()), Part::Path] {
                identity(&[part], IfMissing::Share, &told);
            }
        }
    }
}
