//! Who a request counts as: the fields `key` and `if_missing` of a rule.

use super::reader::{Node, Object};
use super::scope::{a_header, header_name};
use super::shape::{Among, Field, List, Object as Fields, Shape, Words};
use crate::identity::{Identity, IfMissing, Part};

const A_PART: &str = "a part: \"client_ip\", \"method\", \"host\", \"path\", \"route\", or an object of one field \
    header, cookie, query or property";

/// The field `key`.
pub const KEY: Shape = Shape::List(List {
    of: "parts, such as [\"client_ip\"]",
    element: &Shape::Either(
        Words::new(A_PART),
        &[Shape::Choice(&["client_ip", "method", "host", "path", "route"]), NAMED_PART],
    ),
    count: (0, 8),
    otherwise: "at most 8 parts",
});

/// The field `if_missing`.
pub const IF_MISSING: Shape = Shape::Choice(&["skip", "share"]);

const NAMED_PART: Shape = Shape::Object(Fields {
    fields: &[
        Field::new(
            "header",
            Shape::Text(a_header("the name of a header, such as \"x-api-key\"")),
            NONE,
            "the value of the header of this name; several lines are joined by commas",
        ),
        Field::new(
            "cookie",
            NAME_OF_A_COOKIE,
            NONE,
            "the value of the cookie of this name; several are joined by commas",
        ),
        Field::new(
            "query",
            NAME_OF_A_PARAMETER,
            NONE,
            "the decoded value of the query parameter of this name; several are joined by commas",
        ),
        Field::new(
            "property",
            Shape::List(List {
                of: "names that lead to a property, such as [\"connection\", \"uri_san_peer_certificate\"]",
                element: &Shape::Text(Words::matching("a name on the way to a property", ".")),
                count: (1, usize::MAX),
                otherwise: "at least one name",
            }),
            NONE,
            "an attribute of Envoy, such as `[\"connection\", \"uri_san_peer_certificate\"]`, or metadata, such as \
             `[\"xds\", \"route_metadata\", \"filter_metadata\", \"com.example\", \"tenant\"]`",
        ),
    ],
    among: &[Among {
        names: &["header", "cookie", "query", "property"],
        count: (1, 1),
        otherwise: "expected one field of header, cookie, query or property",
    }],
});
const NAME_OF_A_COOKIE: Shape = Shape::Text(Words::matching("the name of a cookie", "."));
const NAME_OF_A_PARAMETER: Shape = Shape::Text(Words::matching("the name of a query parameter", "."));
const NONE: &str = "none";

/// Reads both fields of a rule.
pub fn read(rule: &Object<'_>) -> Option<Identity> {
    let default = Identity::default();
    let parts = rule.or("key", default.parts, |node| node.list_of(read_part));
    let if_missing = rule.or("if_missing", default.if_missing, |node| {
        node.parsed(|text| match text {
            "skip" => Some(IfMissing::Skip),
            "share" => Some(IfMissing::Share),
            _ => None,
        })
    });
    Some(Identity { parts: parts?, if_missing: if_missing? })
}

fn read_part(node: Node<'_>) -> Option<Part> {
    if !node.is_object() {
        return node.parsed(|text| match text {
            "client_ip" => Some(Part::ClientIp),
            "method" => Some(Part::Method),
            "host" => Some(Part::Host),
            "path" => Some(Part::Path),
            "route" => Some(Part::Route),
            _ => None,
        });
    }
    let (name, node) = node.object()?.present().next()?;
    let text = |node: &Node<'_>| node.parsed(|text| (!text.is_empty()).then(|| text.to_owned()));
    Some(match name {
        "header" => Part::Header(node.parsed(header_name)?),
        "cookie" => Part::Cookie(text(&node)?),
        "query" => Part::Query(text(&node)?),
        _ => Part::Property(node.list_of(|node| text(&node))?),
    })
}
