//! Which requests a rule is for: the conditions of its `match` and `unless`.
//!
//! Conditions mean what they mean in Envoy's routes: a prefix is a prefix of the text, an expression has to match the
//! whole of it, `*.example.com` is not `example.com`. Paths and hosts are compared in their normal forms.

use std::net::IpAddr;

use ipnet::IpNet;
use regex_lite::Regex;

use crate::request::Request;

/// One thing that a request has to be.
#[derive(Clone, Debug)]
pub enum Condition {
    /// Its path is this.
    Path(Text),
    /// Its method is one of these.
    Methods(Vec<String>),
    /// Its host is one of these.
    Hosts(Vec<HostPattern>),
    /// Its headers pass all of these.
    Headers(Vec<HeaderTest>),
    /// Its client's address is in one of these networks. A client without an address is in none.
    ClientIp(Vec<IpNet>),
    /// The proxy chose the route of this name for it.
    Route(String),
    /// It is a CORS preflight, or is none.
    CorsPreflight(bool),
}

/// What a text has to be.
#[derive(Clone, Debug)]
pub enum Text {
    /// This.
    Exact(String),
    /// Begins so.
    Prefix(String),
    /// Ends so.
    Suffix(String),
    /// Has this in it.
    Contains(String),
    /// Matches this as a whole.
    Regex(Regex),
}

impl Text {
    /// Compiles an expression that has to match the whole text. The error says what is wrong with it.
    pub fn regex(expression: &str) -> Result<Self, String> {
        // By itself first, so that "a)(b" is not mended by the group around it.
        Regex::new(expression)
            .and_then(|_| Regex::new(&format!("^(?:{expression})$")))
            .map(Self::Regex)
            .map_err(|error| error.to_string())
    }

    fn holds(&self, text: &[u8]) -> bool {
        match self {
            Self::Exact(other) => text == other.as_bytes(),
            Self::Prefix(prefix) => text.starts_with(prefix.as_bytes()),
            Self::Suffix(suffix) => text.ends_with(suffix.as_bytes()),
            Self::Contains(part) => part.is_empty() || text.windows(part.len()).any(|window| window == part.as_bytes()),
            Self::Regex(regex) => regex.is_match(&String::from_utf8_lossy(text)),
        }
    }

    /// Whether every text of this kind is one of the other. `false` where that cannot be told.
    fn implies(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Exact(text), other) => other.holds(text.as_bytes()),
            (Self::Prefix(this), Self::Prefix(other)) => this.starts_with(other.as_str()),
            (Self::Suffix(this), Self::Suffix(other)) => this.ends_with(other.as_str()),
            (Self::Prefix(this) | Self::Suffix(this) | Self::Contains(this), Self::Contains(other)) => {
                this.contains(other.as_str())
            }
            (Self::Regex(this), Self::Regex(other)) => this.as_str() == other.as_str(),
            _ => false,
        }
    }
}

/// A host, or all hosts below one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPattern {
    /// This host.
    Exact(String),
    /// Hosts that end so, with the dot: `.example.com`.
    Below(String),
}

impl HostPattern {
    /// Reads a host or `*.suffix`, or `None` where it is neither. Case does not matter, and there is no port.
    pub fn new(text: &str) -> Option<Self> {
        let fits = |host: &str| {
            !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'*' | b'/' | b'@'))
        };
        let text = text.to_ascii_lowercase();
        let has_port = text.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
        match text.strip_prefix("*.") {
            _ if has_port => None,
            Some(suffix) if fits(suffix) => Some(Self::Below(format!(".{suffix}"))),
            None if fits(&text) => Some(Self::Exact(text)),
            _ => None,
        }
    }

    fn holds(&self, host: &str) -> bool {
        match self {
            Self::Exact(other) => host == other,
            Self::Below(suffix) => host.len() > suffix.len() && host.ends_with(suffix.as_str()),
        }
    }

    fn implies(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Exact(host), other) => other.holds(host),
            (Self::Below(this), Self::Below(other)) => this.ends_with(other.as_str()),
            (Self::Below(_), Self::Exact(_)) => false,
        }
    }
}

/// What a header has to be.
#[derive(Clone, Debug)]
pub struct HeaderTest {
    /// Its name in lower case.
    pub name: String,
    /// What its value has to be; `None` where being there is enough.
    pub value: Option<Text>,
    /// The opposite is meant: no such header, or one of another value.
    pub invert: bool,
}

impl HeaderTest {
    fn holds(&self, request: &Request<'_>) -> bool {
        // One that is blank says no more than one that is absent, here as in a rule's key.
        let value = request.header(&self.name).filter(|value| !value.trim_ascii().is_empty());
        let holds = match (&self.value, value) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(test), Some(value)) => test.holds(&value),
        };
        holds != self.invert
    }

    fn implies(&self, other: &Self) -> bool {
        let values = match (&self.value, &other.value) {
            // Of two opposites, the one of the wider test is the narrower.
            (Some(this), Some(other)) if self.invert => other.implies(this),
            (Some(this), Some(other)) => this.implies(other),
            (None, Some(_)) => self.invert,
            (Some(_), None) => !self.invert,
            (None, None) => true,
        };
        self.name == other.name && self.invert == other.invert && values
    }
}

impl Condition {
    fn holds(&self, request: &Request<'_>) -> bool {
        match self {
            Self::Path(test) => test.holds(request.path().as_bytes()),
            Self::Methods(methods) => methods.iter().any(|method| method.as_bytes() == request.method()),
            Self::Hosts(hosts) => hosts.iter().any(|pattern| pattern.holds(request.host())),
            Self::Headers(tests) => tests.iter().all(|test| test.holds(request)),
            Self::ClientIp(networks) => request.address().is_some_and(|address| is_in(address, networks)),
            Self::Route(name) => request.route().is_some_and(|route| route == name.as_bytes()),
            Self::CorsPreflight(wanted) => request.is_cors_preflight() == *wanted,
        }
    }

    /// Whether every request that is so is also as the other says. `false` where that cannot be told.
    fn implies(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Path(this), Self::Path(other)) => this.implies(other),
            (Self::Methods(these), Self::Methods(others)) => each(these, others, |this, other| this == other),
            (Self::Hosts(these), Self::Hosts(others)) => each(these, others, HostPattern::implies),
            (Self::Headers(these), Self::Headers(others)) => each(others, these, |other, this| this.implies(other)),
            (Self::ClientIp(these), Self::ClientIp(others)) => each(these, others, |this, other| other.contains(this)),
            (Self::Route(this), Self::Route(other)) => this == other,
            (Self::CorsPreflight(this), Self::CorsPreflight(other)) => this == other,
            _ => false,
        }
    }
}

/// Whether for each of these there is one of those of which it is so.
fn each<T>(these: &[T], those: &[T], is_so: impl Fn(&T, &T) -> bool) -> bool {
    these.iter().all(|this| those.iter().any(|that| is_so(this, that)))
}

fn is_in(address: IpAddr, networks: &[IpNet]) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

/// Conditions that all have to hold. Without any, it holds for every request.
#[derive(Clone, Debug, Default)]
pub struct Conditions(pub Vec<Condition>);

impl Conditions {
    /// Whether the request is as all of them say.
    pub fn hold(&self, request: &Request<'_>) -> bool {
        self.0.iter().all(|condition| condition.holds(request))
    }

    /// Whether every request for which these hold is one for which the others hold. `false` where that cannot be told.
    pub fn imply(&self, others: &Self) -> bool {
        each(&others.0, &self.0, |other, this| this.implies(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_ip::{ClientIp, Trust};
    use crate::request::tests::Told;

    fn holds(condition: Condition, headers: &[(&'static str, &str)]) -> bool {
        let mut told = Told::new(headers);
        told.properties.push(("xds.route_name", b"checkout".to_vec()));
        let client_ip = ClientIp::default();
        Conditions(vec![condition]).hold(&Request::new(&told, &client_ip))
    }

    fn header(value: Option<Text>, invert: bool) -> Condition {
        Condition::Headers(vec![HeaderTest { name: "x-plan".to_owned(), value, invert }])
    }

    #[test]
    fn a_path_is_compared_in_its_normal_form() {
        let login = || Condition::Path(Text::Exact("/login".to_owned()));
        for path in ["/login", "//login", "/./login", "/%6Cogin", "/login?x=1", "/a/../login"] {
            assert!(holds(login(), &[(":path", path)]), "{path}");
        }
        for path in ["/Login", "/login/", "/login/x", "/a%2Flogin", ""] {
            assert!(!holds(login(), &[(":path", path)]), "{path}");
        }
        let api = || Condition::Path(Text::Prefix("/api".to_owned()));
        assert!(holds(api(), &[(":path", "/apis")]) && holds(api(), &[(":path", "/x/..//api/y")]));
        let number = || Condition::Path(Text::regex("/orders/[0-9]+|/x").unwrap());
        assert!(holds(number(), &[(":path", "/orders/17?y")]));
        for path in ["/orders/17/items", "/y/orders/17", "/xy", "/orders/"] {
            assert!(!holds(number(), &[(":path", path)]), "{path}");
        }
    }

    #[test]
    fn methods_hosts_routes_and_preflights_are_as_envoy_means_them() {
        let methods = || Condition::Methods(vec!["GET".to_owned(), "HEAD".to_owned()]);
        assert!(holds(methods(), &[(":method", "HEAD")]));
        assert!(!holds(methods(), &[(":method", "get")]) && !holds(methods(), &[]));
        let hosts = || {
            Condition::Hosts(
                ["*.example.com", "Example.org"].iter().filter_map(|text| HostPattern::new(text)).collect(),
            )
        };
        for host in ["a.example.com", "A.B.EXAMPLE.com:8080", "example.org:80"] {
            assert!(holds(hosts(), &[(":authority", host)]), "{host}");
        }
        for host in ["example.com", ".example.com", "badexample.com", "a.example.org", ""] {
            assert!(!holds(hosts(), &[(":authority", host)]), "{host}");
        }
        assert!(holds(Condition::Route("checkout".to_owned()), &[]));
        assert!(!holds(Condition::Route("check".to_owned()), &[]));
        let preflight = [(":method", "OPTIONS"), ("origin", "https://a"), ("access-control-request-method", "PUT")];
        assert!(holds(Condition::CorsPreflight(true), &preflight));
        assert!(!holds(Condition::CorsPreflight(false), &preflight));
        assert!(!holds(Condition::CorsPreflight(true), &preflight[..2]));
    }

    #[test]
    fn a_header_is_its_lines_joined_and_may_be_wanted_otherwise() {
        let gold = || Some(Text::Exact("gold".to_owned()));
        let cases: &[(Condition, &[&str], bool)] = &[
            (header(gold(), false), &["gold"], true),
            (header(gold(), false), &["Gold"], false),
            (header(gold(), false), &["gold", "x"], false),
            (header(gold(), false), &[], false),
            (header(gold(), true), &["gold"], false),
            (header(gold(), true), &["silver"], true),
            (header(gold(), true), &[], true),
            (header(None, false), &["x"], true),
            (header(None, false), &[" \t"], false),
            (header(None, false), &[], false),
            (header(None, true), &[""], true),
            (header(None, true), &[], true),
            (header(gold(), true), &[""], true),
            (header(Some(Text::Prefix("go".to_owned())), false), &["gold"], true),
            (header(Some(Text::Suffix("ld".to_owned())), false), &["gold"], true),
            (header(Some(Text::Contains("d,s".to_owned())), false), &["gold", "silver"], true),
            (header(Some(Text::Contains(String::new())), false), &["x"], true),
            (header(Some(Text::Contains(String::new())), false), &[""], false),
            (header(Some(Text::regex("g.ld").unwrap()), false), &["gold"], true),
            (header(Some(Text::regex("g.l").unwrap()), false), &["gold"], false),
        ];
        for (condition, lines, expected) in cases {
            let headers = lines.iter().map(|line| ("x-plan", *line)).collect::<Vec<_>>();
            assert_eq!(holds(condition.clone(), &headers), *expected, "{condition:?} {lines:?}");
        }
    }

    #[test]
    fn a_network_holds_the_whole_address_and_not_its_identity() {
        let networks =
            |texts: &[&str]| Condition::ClientIp(texts.iter().filter_map(|text| Trust::network(text)).collect());
        assert!(holds(networks(&["198.51.100.0/24", "192.0.2.1"]), &[]));
        assert!(!holds(networks(&["192.0.2.2/32"]), &[]));
        let told = Told::from(b"/var/run/socket");
        let client_ip = ClientIp::default();
        let request = Request::new(&told, &client_ip);
        assert!(!Conditions(vec![networks(&["0.0.0.0/0", "::/0"])]).hold(&request));
    }

    #[test]
    fn all_conditions_have_to_hold_and_none_is_as_good_as_all() {
        let told = Told::new(&[(":method", "GET"), (":path", "/a")]);
        let client_ip = ClientIp::default();
        let request = Request::new(&told, &client_ip);
        let (get, a, b) = (
            Condition::Methods(vec!["GET".to_owned()]),
            Condition::Path(Text::Exact("/a".to_owned())),
            Condition::Path(Text::Exact("/b".to_owned())),
        );
        assert!(Conditions::default().hold(&request));
        assert!(Conditions(vec![get.clone(), a]).hold(&request));
        assert!(!Conditions(vec![get, b]).hold(&request));
    }

    #[test]
    fn an_expression_is_refused_in_words() {
        assert!(Text::regex("a(").is_err() && Text::regex("a)(b").is_err() && Text::regex("[z-a]").is_err());
    }

    #[test]
    fn a_host_pattern_has_no_port_and_one_star_at_its_beginning() {
        for text in ["", "*", "*.", "a.*", "a:80", "*.a:80", "a/b", "u@a", "a b"] {
            assert_eq!(HostPattern::new(text), None, "{text}");
        }
        assert!(HostPattern::new("[2001:db8::1]").is_some());
    }

    mod implication {
        use proptest::prelude::*;
        use proptest::sample::{select, subsequence};

        use super::*;

        fn text() -> impl Strategy<Value = Text> {
            let part = || select(vec!["", "/", "/a", "/ab", "a", "b", "ab", "/a/b"]);
            prop_oneof![
                part().prop_map(|text| Text::Exact(text.to_owned())),
                part().prop_map(|text| Text::Prefix(text.to_owned())),
                part().prop_map(|text| Text::Suffix(text.to_owned())),
                part().prop_map(|text| Text::Contains(text.to_owned())),
                select(vec!["/a.*", "[ab]+"]).prop_map(|text| Text::regex(text).unwrap()),
            ]
        }

        fn test() -> impl Strategy<Value = HeaderTest> {
            let name = select(vec!["x-plan", "x-team"]);
            (name, proptest::option::of(text()), any::<bool>()).prop_map(|(name, value, invert)| HeaderTest {
                name: name.to_owned(),
                value,
                invert,
            })
        }

        fn condition() -> impl Strategy<Value = Condition> {
            let methods = vec!["GET".to_owned(), "PUT".to_owned(), "OPTIONS".to_owned()];
            let hosts = ["a.b", "*.a.b", "*.b", "c.a.b"].map(|text| HostPattern::new(text).unwrap()).to_vec();
            let networks = ["192.0.2.0/24", "192.0.2.1", "0.0.0.0/0", "::/0"].map(|text| Trust::network(text).unwrap());
            prop_oneof![
                text().prop_map(Condition::Path),
                subsequence(methods, 1..3).prop_map(Condition::Methods),
                subsequence(hosts, 1..3).prop_map(Condition::Hosts),
                proptest::collection::vec(test(), 1..3).prop_map(Condition::Headers),
                subsequence(networks.to_vec(), 1..3).prop_map(Condition::ClientIp),
                select(vec!["checkout", "other"]).prop_map(|name| Condition::Route(name.to_owned())),
                any::<bool>().prop_map(Condition::CorsPreflight),
            ]
        }

        fn told() -> impl Strategy<Value = Told> {
            let some = |texts: Vec<&'static str>| proptest::option::of(select(texts));
            let headers = (
                some(vec!["GET", "PUT", "OPTIONS"]),
                some(vec!["/", "/a", "/ab", "/a/b", "/b"]),
                some(vec!["a.b", "c.a.b", "d.c.a.b", "b"]),
                some(vec!["", "a", "ab", "/ab", "/a/b"]),
                some(vec!["", "b"]),
                (any::<bool>(), any::<bool>()),
            );
            headers.prop_map(|(method, path, host, plan, team, (preflight, routed))| {
                let named =
                    [(":method", method), (":path", path), (":authority", host), ("x-plan", plan), ("x-team", team)];
                let mut headers =
                    named.into_iter().filter_map(|(name, value)| Some((name, value?))).collect::<Vec<_>>();
                if preflight {
                    headers.extend([("origin", "o"), ("access-control-request-method", "PUT")]);
                }
                let mut told = Told::new(&headers);
                if routed {
                    told.properties.push(("xds.route_name", b"checkout".to_vec()));
                }
                told
            })
        }

        proptest! {
            #![proptest_config(ProptestConfig::with_cases(2000))]
            #[test]
            fn what_is_said_to_imply_does(
                these in proptest::collection::vec(condition(), 0..4),
                others in proptest::collection::vec(condition(), 0..3),
                requests in proptest::collection::vec(told(), 1..10)) {
                let (these, others) = (Conditions(these), Conditions(others));
                let client_ip = ClientIp::default();
                if these.imply(&others) {
                    for told in &requests {
                        let request = Request::new(told, &client_ip);
                        prop_assert!(!these.hold(&request) || others.hold(&request));
                    }
                }
            }
        }
    }
}
