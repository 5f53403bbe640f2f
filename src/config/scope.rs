//! Which requests a rule is for: the fields `match` and `unless`.

use super::reader::{Node, Object};
use super::{all, read_networks};
use crate::condition::{Condition, Conditions, HeaderTest, HostPattern, Text};
use crate::path;
use crate::rule::Scope;

const FIELDS: [&str; 9] =
    ["path", "path_prefix", "path_regex", "methods", "hosts", "headers", "client_ip", "route", "cors_preflight"];
const AN_EXPRESSION: &str = "a regular expression that matches the whole text";

/// Reads both fields of a rule.
pub fn read(rule: &Object<'_>) -> Option<Scope> {
    let alternatives = |name| rule.get(name).map_or_else(|| Some(Vec::new()), read_alternatives);
    let (matches, unless) = (alternatives("match"), alternatives("unless"));
    Some(Scope { matches: matches?, unless: unless? })
}

/// Conditions, or a list of such of which one has to hold.
fn read_alternatives(node: Node<'_>) -> Option<Vec<Conditions>> {
    if !node.is_list() {
        return read_conditions(node).map(|conditions| vec![conditions]);
    }
    let nodes = node.list("conditions")?;
    if nodes.is_empty() {
        node.expected("at least one object of conditions; leave the field out to mean no condition");
    }
    all(nodes.into_iter().map(read_conditions))
}

fn read_conditions(node: Node<'_>) -> Option<Conditions> {
    let object = node.object(&FIELDS)?;
    if object.is_empty() {
        object.fault("found no condition, expected at least one; leave the field out to mean no condition".to_owned());
    }
    let path = object.get("path").map(|node| read_path(&node).map(Text::Exact));
    let prefix = object.get("path_prefix").map(|node| read_path(&node).map(Text::Prefix));
    let regex = object.get("path_regex").map(|node| read_regex(&node));
    let paths = [path, prefix, regex].into_iter().flatten().map(|text| text.map(Condition::Path));
    let methods = object.get("methods").map(|node| {
        let methods = read_list(&node, "methods, such as \"GET\"", |node| {
            node.parsed("a method in capitals, such as \"GET\"", method)
        });
        methods.map(Condition::Methods)
    });
    let hosts = object.get("hosts").map(|node| {
        let what = "a host without a port, or all below one, such as \"api.example.com\" or \"*.example.com\"";
        read_list(&node, "hosts", |node| node.parsed(what, HostPattern::new)).map(Condition::Hosts)
    });
    let headers = object.get("headers").map(|node| read_list(&node, "header conditions", read_header));
    let client_ip = object.get("client_ip").map(|node| read_networks(&node).map(Condition::ClientIp));
    let route = object.get("route").map(|node| {
        let what = "the name of a route";
        node.parsed(what, |text| Some(text.to_owned()).filter(|text| !text.is_empty())).map(Condition::Route)
    });
    let preflight = object.get("cors_preflight").map(|node| node.boolean().map(Condition::CorsPreflight));
    let single = [methods, hosts, client_ip, route, preflight].into_iter().flatten();
    let conditions = all(paths.chain(single));
    let headers = headers.unwrap_or_else(|| Some(Vec::new()));
    let (mut conditions, headers) = (conditions?, headers?);
    conditions.extend(headers.into_iter().map(Condition::Header));
    Some(Conditions(conditions))
}

fn read_list<'a, T>(node: &Node<'a>, of: &str, read: impl FnMut(Node<'a>) -> Option<T>) -> Option<Vec<T>> {
    let nodes = node.list(of)?;
    if nodes.is_empty() {
        node.expected(&format!("at least one of the {of}"));
    }
    all(nodes.into_iter().map(read))
}

/// A path, which has to be in its normal form: another one would never be met.
fn read_path(node: &Node<'_>) -> Option<String> {
    let text = node.text("a path that begins with a slash, such as \"/login\"")?;
    let normal = path::normal(text.as_bytes());
    if text != normal || !text.starts_with('/') {
        let normal = if normal.starts_with('/') { normal } else { format!("/{normal}") };
        node.expected(&format!("a path in its normal form, \"{normal}\""));
        return None;
    }
    Some(normal)
}

fn read_regex(node: &Node<'_>) -> Option<Text> {
    let text = node.text(AN_EXPRESSION)?;
    Text::regex(text).map_err(|error| node.expected(&format!("{AN_EXPRESSION} ({error})"))).ok()
}

fn method(text: &str) -> Option<String> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-')).then(|| text.to_owned())
}

fn read_header(node: Node<'_>) -> Option<HeaderTest> {
    const TESTS: [&str; 6] = ["exact", "prefix", "suffix", "contains", "regex", "present"];
    let object = node.object(&["name", "exact", "prefix", "suffix", "contains", "regex", "present", "invert"])?;
    let what = "the name of a header, such as \"x-plan\"";
    let name = object.require("name", what).and_then(|node| node.parsed(what, header_name));
    let invert = object.get("invert").map_or(Some(false), |node| node.boolean());
    let given = TESTS.into_iter().filter_map(|test| object.get(test).map(|node| (test, node))).collect::<Vec<_>>();
    if given.len() > 1 {
        object.fault(format!("found {} tests, expected one of {}", given.len(), TESTS.join(", ")));
    }
    // Being there is what is tested where nothing else is; `present: false` is the opposite of that.
    let (mut value, mut absent) = (Some(None), false);
    for (test, node) in given {
        let text = || node.text("a text").map(str::to_owned);
        value = match test {
            "exact" => text().map(Text::Exact).map(Some),
            "prefix" => text().map(Text::Prefix).map(Some),
            "suffix" => text().map(Text::Suffix).map(Some),
            "contains" => text().map(Text::Contains).map(Some),
            "regex" => read_regex(&node).map(Some),
            _ => node.boolean().map(|present| {
                absent = !present;
                None
            }),
        };
    }
    Some(HeaderTest { name: name?, value: value?, invert: invert? != absent })
}

/// The name of a header in lower case (RFC 9110, section 5.6.2), or `None` where the text is not one.
pub fn header_name(text: &str) -> Option<String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (!text.is_empty() && text.len() <= 256 && text.bytes().all(fits)).then(|| text.to_ascii_lowercase())
}
