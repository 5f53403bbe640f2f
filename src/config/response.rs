//! What clients are told: the fields `response` and `failure_response`.

use super::reader::{Node, Object, all};
use super::scope::header_name;
use super::shape::{Field, Shape, Words};
use crate::response::{HeaderStyle, Reply, Style};

/// The longest body that the filter sends, in bytes.
const LONGEST_BODY: usize = 64 * 1024;

const STATUS: Shape = Shape::Integer(400, 599);
const BODY: Shape = Shape::text("a text of at most 65536 bytes");
const CONTENT_TYPE: Shape =
    Shape::Text(Words::matching("a content type, such as \"application/json\"", "^[!-~][ -~]*/[ -~]*$|^/[ -~]*$"));
const GRPC_STATUS: Shape = Shape::Integer(1, 16);

/// The field `response`.
pub const DENIAL: Shape = Shape::fields(&[
    Field::new("status", STATUS, "429", "the HTTP status of a denial"),
    Field::new("body", BODY, "\"rate limit exceeded\\n\"", "its body"),
    Field::new("content_type", CONTENT_TYPE, "\"text/plain\"", "the content type of the body"),
    Field::new("grpc_status", GRPC_STATUS, "8", "the status for a gRPC request, 8 being RESOURCE_EXHAUSTED"),
    Field::new(
        "headers",
        Shape::Choice(&["x-ratelimit", "ietf", "both", "none"]),
        "\"x-ratelimit\"",
        "which headers tell a client where it stands, admitted or denied: `x-ratelimit-limit`, `-remaining` and `-reset`; \
         `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-10; both; or none",
    ),
    Field::new("retry_after", Shape::Flag, "true", "whether a denial says how long to wait"),
    Field::new(
        "set",
        Shape::Map(
            Words::new("an object of headers and their values"),
            &Shape::Text(Words::matching(
                "the value of a header, of printable ASCII characters",
                "^[!-~]([ -~]*[!-~])?$",
            )),
        ),
        "{}",
        "further headers of a denial, by their names; one of them replaces one of the filter's",
    ),
]);

/// The field `failure_response`.
pub const UNAVAILABLE: Shape = Shape::fields(&[
    Field::new("status", STATUS, "503", "the HTTP status"),
    Field::new("body", BODY, "\"rate limit unavailable\\n\"", "the body"),
    Field::new("content_type", CONTENT_TYPE, "\"text/plain\"", "the content type of the body"),
    Field::new("grpc_status", GRPC_STATUS, "14", "the status for a gRPC request, 14 being UNAVAILABLE"),
]);

/// Reads `response`; a field that is not there is as in `base`.
pub fn read(node: Node<'_>, base: &Style) -> Option<Style> {
    let object = node.object()?;
    let reply = read_reply(&object, &base.reply);
    let headers = object.or("headers", base.headers, |node| {
        node.parsed(|text| match text {
            "x-ratelimit" => Some(HeaderStyle::XRateLimit),
            "ietf" => Some(HeaderStyle::Ietf),
            "both" => Some(HeaderStyle::Both),
            "none" => Some(HeaderStyle::None),
            _ => None,
        })
    });
    let retry_after = object.or("retry_after", base.retry_after, |node| node.boolean());
    let own = object.or("set", Vec::new(), |node| read_set(&node))?;
    let mut set = base.set.clone();
    set.retain(|(name, _)| own.iter().all(|(other, _)| other != name));
    set.extend(own);
    Some(Style { reply: reply?, headers: headers?, retry_after: retry_after?, set })
}

/// Reads `failure_response`.
pub fn read_unavailable(node: Node<'_>) -> Option<Reply> {
    read_reply(&node.object()?, &Reply::unavailable())
}

fn read_reply(object: &Object<'_>, base: &Reply) -> Option<Reply> {
    let status = object.or("status", base.status, |node| node.integer());
    let body = object.or("body", base.body.clone(), |node| {
        node.parsed(|text| (text.len() <= LONGEST_BODY).then(|| text.to_owned()))
    });
    let content_type = object.or("content_type", base.content_type.clone(), |node| {
        node.parsed(|text| (text.contains('/') && is_value(text)).then(|| Some(text.to_owned())))
    });
    let grpc_status = object.or("grpc_status", base.grpc_status, |node| node.integer());
    Some(Reply { status: status?, body: body?, content_type: content_type?, grpc_status: grpc_status? })
}

fn read_set(node: &Node<'_>) -> Option<Vec<(String, String)>> {
    let headers = node.entries()?.into_iter().map(|(name, node)| {
        let name = header_name(name).filter(|name| {
            !matches!(name.as_str(), "content-length" | "content-type" | "transfer-encoding" | "connection")
        });
        if name.is_none() {
            node.fault("expected the name of a header that is not content-type (there is a field for it), content-length, transfer-encoding or connection".to_owned());
        }
        name.zip(node.parsed(|text| is_value(text).then(|| text.to_owned())))
    });
    all(headers)
}

/// Whether a text can be the value of a header: printable ASCII, no blank at either end.
fn is_value(text: &str) -> bool {
    !text.is_empty() && text.trim() == text && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
}
