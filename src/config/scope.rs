//! Which requests a rule is for: the fields `match` and `unless`.

use super::client_ip::{NETWORKS, networks};
use super::reader::{Node, Object, all};
use super::shape::{Among, Field, List, Object as Fields, Shape, Words};
use crate::condition::{Condition, Conditions, HeaderTest, HostPattern, Text};
use crate::path;
use crate::rule::Scope;

/// The name of a header.
pub const fn a_header(expected: &'static str) -> Words {
    Words::matching(expected, "^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}$")
}

const A_PATH: Words = Words::matching("a path that begins with a slash, such as \"/login\"", "^/[^?]*$");
const AN_EXPRESSION: Shape = Shape::text("a regular expression that matches the whole text");
const A_TEXT: Shape = Shape::text("a text");

/// The fields, each of which is an object of conditions or a list of such.
pub const SHAPE: Shape = Shape::Either(
    Words::new("an object of conditions, or a list of such"),
    &[
        CONDITIONS,
        Shape::List(List {
            of: "conditions",
            element: &CONDITIONS,
            count: (1, usize::MAX),
            otherwise: "at least one object of conditions; leave the field out to mean no condition",
        }),
    ],
);

const CONDITIONS: Shape = Shape::Object(Fields {
    fields: &[
        Field::new("path", Shape::Text(A_PATH), NONE, "the path is this"),
        Field::new(
            "path_prefix",
            Shape::Text(A_PATH),
            NONE,
            "the path begins so, as text: `/api` is a prefix of `/apis`",
        ),
        Field::new("path_regex", AN_EXPRESSION, NONE, "the whole path matches this"),
        Field::new(
            "methods",
            Shape::List(List {
                of: "methods, such as \"GET\"",
                element: &Shape::Text(Words::matching("a method in capitals, such as \"GET\"", "^[A-Z-]+$")),
                count: (1, usize::MAX),
                otherwise: "at least one of the methods, such as \"GET\"",
            }),
            NONE,
            "the method is one of these",
        ),
        Field::new(
            "hosts",
            Shape::List(List {
                of: "hosts",
                element: &Shape::text(
                    "a host without a port, or all below one, such as \"api.example.com\" or \"*.example.com\"",
                ),
                count: (1, usize::MAX),
                otherwise: "at least one of the hosts",
            }),
            NONE,
            "the host is one of these, or below one: `*.example.com` is not `example.com`; port and case do not count",
        ),
        Field::new(
            "headers",
            Shape::List(List {
                of: "header conditions",
                element: &HEADER,
                count: (1, usize::MAX),
                otherwise: "at least one of the header conditions",
            }),
            NONE,
            "each of these holds; several lines of a header are joined by commas",
        ),
        Field::new("client_ip", NETWORKS, NONE, "the client's address is in one of these networks"),
        Field::new(
            "route",
            Shape::Text(Words::matching("the name of a route", ".")),
            NONE,
            "Envoy chose the route of this name",
        ),
        Field::new(
            "cors_preflight",
            Shape::Flag,
            NONE,
            "the request is a CORS preflight (`OPTIONS` with `origin` and `access-control-request-method`), or, where \
             this is `false`, is none",
        ),
    ],
    among: &[Among {
        names: &[
            "path",
            "path_prefix",
            "path_regex",
            "methods",
            "hosts",
            "headers",
            "client_ip",
            "route",
            "cors_preflight",
        ],
        count: (1, 9),
        otherwise: "found no condition, expected at least one; leave the field out to mean no condition",
    }],
});

const HEADER: Shape = Shape::Object(Fields {
    fields: &[
        Field::required(
            "name",
            Shape::Text(a_header("the name of a header, such as \"x-plan\"")),
            "the header's name, in any case",
        ),
        Field::new("exact", A_TEXT, NONE, "its value is this"),
        Field::new("prefix", A_TEXT, NONE, "its value begins so"),
        Field::new("suffix", A_TEXT, NONE, "its value ends so"),
        Field::new("contains", A_TEXT, NONE, "its value has this in it"),
        Field::new("regex", AN_EXPRESSION, NONE, "its whole value matches this"),
        Field::new("present", Shape::Flag, "true", "it is there and not blank, or, where this is `false`, is not"),
        Field::new("invert", Shape::Flag, "false", "the opposite is meant: no such header, or one of another value"),
    ],
    among: &[Among {
        names: &["exact", "prefix", "suffix", "contains", "regex", "present"],
        count: (0, 1),
        otherwise: "several tests, expected one of exact, prefix, suffix, contains, regex, present",
    }],
});

/// What holds where a condition is left out.
const NONE: &str = "any";

/// Reads both fields of a rule.
pub fn read(rule: &Object<'_>) -> Option<Scope> {
    let (matches, unless) = (alternatives(rule, "match"), alternatives(rule, "unless"));
    Some(Scope { matches: matches?, unless: unless? })
}

/// Conditions, or a list of such of which one has to hold.
fn alternatives(rule: &Object<'_>, name: &str) -> Option<Vec<Conditions>> {
    rule.or(name, Vec::new(), |node| {
        if node.is_list() { node.list_of(read_conditions) } else { Some(vec![read_conditions(node)?]) }
    })
}

fn read_conditions(node: Node<'_>) -> Option<Conditions> {
    let object = node.object()?;
    let conditions = object.present().map(|(name, node)| read_condition(name, &node));
    all(conditions).map(Conditions)
}

fn read_condition(name: &str, node: &Node<'_>) -> Option<Condition> {
    Some(match name {
        "path" => Condition::Path(Text::Exact(read_path(node)?)),
        "path_prefix" => Condition::Path(Text::Prefix(read_path(node)?)),
        "path_regex" => Condition::Path(read_regex(node)?),
        "methods" => Condition::Methods(node.list_of(|node| node.parsed(method))?),
        "hosts" => Condition::Hosts(node.list_of(|node| node.parsed(HostPattern::new))?),
        "headers" => Condition::Headers(node.list_of(read_header)?),
        "client_ip" => Condition::ClientIp(networks(node)?),
        "route" => Condition::Route(node.parsed(|text| (!text.is_empty()).then(|| text.to_owned()))?),
        _ => Condition::CorsPreflight(node.boolean()?),
    })
}

/// A path, which has to be in its normal form: another one would never be met.
fn read_path(node: &Node<'_>) -> Option<String> {
    let text = node.text()?;
    let normal = path::normal(text.as_bytes());
    if text != normal || !text.starts_with('/') {
        let normal = if normal.starts_with('/') { normal } else { format!("/{normal}") };
        node.expected(&format!("a path in its normal form, \"{normal}\""));
        return None;
    }
    Some(normal)
}

fn read_regex(node: &Node<'_>) -> Option<Text> {
    let text = node.text()?;
    let expected = AN_EXPRESSION.expected();
    Text::regex(text).map_err(|error| node.expected(&format!("{expected} ({error})"))).ok()
}

fn method(text: &str) -> Option<String> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-')).then(|| text.to_owned())
}

fn read_header(node: Node<'_>) -> Option<HeaderTest> {
    let object = node.object()?;
    let name = object.get("name").and_then(|node| node.parsed(header_name));
    let invert = object.or("invert", false, |node| node.boolean());
    // Being there is what is tested where nothing else is; `present: false` is the opposite of that.
    let present = object.or("present", true, |node| node.boolean());
    let value = |name, test: fn(String) -> Text| object.given(name, |node| node.text().map(str::to_owned).map(test));
    let tests = [
        value("exact", Text::Exact),
        value("prefix", Text::Prefix),
        value("suffix", Text::Suffix),
        value("contains", Text::Contains),
        object.given("regex", |node| read_regex(&node)),
    ];
    let value = all(tests.into_iter())?.into_iter().flatten().next();
    Some(HeaderTest { name: name?, value, invert: invert? == present? })
}

/// The name of a header in lower case (RFC 9110, section 5.6.2), or `None` where the text is not one.
pub fn header_name(text: &str) -> Option<String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (!text.is_empty() && text.len() <= 256 && text.bytes().all(fits)).then(|| text.to_ascii_lowercase())
}
