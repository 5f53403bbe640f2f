//! Who a request counts as: the fields `key` and `if_missing` of a rule.

use super::all;
use super::reader::{Node, Object};
use super::scope::header_name;
use crate::identity::{Identity, IfMissing, Part};

/// The most parts that a key may have.
const MOST_PARTS: usize = 8;
const A_PART: &str = "a part: \"client_ip\", \"method\", \"host\", \"path\", \"route\", or an object of one field \
    header, cookie, query or property";

/// Reads both fields of a rule.
pub fn read(rule: &Object<'_>) -> Option<Identity> {
    let default = Identity::default();
    let parts = rule.get("key").map_or(Some(default.parts), |node| {
        let nodes = node.list("parts, such as [\"client_ip\"]")?;
        if nodes.len() > MOST_PARTS {
            node.expected(&format!("at most {MOST_PARTS} parts"));
        }
        all(nodes.into_iter().map(read_part))
    });
    let if_missing = rule.get("if_missing").map_or(Some(default.if_missing), |node| {
        node.parsed("\"skip\" or \"share\"", |text| match text {
            "skip" => Some(IfMissing::Skip),
            "share" => Some(IfMissing::Share),
            _ => None,
        })
    });
    Some(Identity { parts: parts?, if_missing: if_missing? })
}

fn read_part(node: Node<'_>) -> Option<Part> {
    if !node.is_object() {
        return node.parsed(A_PART, |text| match text {
            "client_ip" => Some(Part::ClientIp),
            "method" => Some(Part::Method),
            "host" => Some(Part::Host),
            "path" => Some(Part::Path),
            "route" => Some(Part::Route),
            _ => None,
        });
    }
    let object = node.clone().object(&["header", "cookie", "query", "property"])?;
    let name = |node: Node<'_>, what| node.parsed(what, |text| Some(text.to_owned()).filter(|text| !text.is_empty()));
    let header = object
        .get("header")
        .map(|node| node.parsed("the name of a header, such as \"x-api-key\"", header_name).map(Part::Header));
    let cookie = object.get("cookie").map(|node| name(node, "the name of a cookie").map(Part::Cookie));
    let query = object.get("query").map(|node| name(node, "the name of a query parameter").map(Part::Query));
    let property = object.get("property").map(|node| {
        let what = "names that lead to a property, such as [\"connection\", \"uri_san_peer_certificate\"]";
        let path = node.list(what)?;
        if path.is_empty() {
            node.expected("at least one name");
        }
        all(path.into_iter().map(|node| name(node, "a name on the way to a property"))).map(Part::Property)
    });
    let mut parts = [header, cookie, query, property].into_iter().flatten();
    match (parts.next(), parts.next()) {
        (Some(part), None) => part,
        _ => {
            node.expected(A_PART);
            None
        }
    }
}
