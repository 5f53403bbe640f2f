//! What clients are told: the fields `response` and `failure_response`.

use super::reader::Node;
use super::scope::header_name;
use crate::response::{HeaderStyle, Reply, Style};

/// The longest body that the filter sends, in bytes.
const LONGEST_BODY: usize = 64 * 1024;

/// Reads `response`; a field that is not there is as in `base`.
pub fn read(node: Node<'_>, base: &Style) -> Option<Style> {
    let fields = ["status", "body", "content_type", "grpc_status", "headers", "retry_after", "set"];
    let object = node.object(&fields)?;
    let reply = read_fields(|name| object.get(name), &base.reply);
    let headers = object.get("headers").map_or(Some(base.headers), |node| {
        node.parsed("\"x-ratelimit\", \"ietf\", \"both\" or \"none\"", |text| match text {
            "x-ratelimit" => Some(HeaderStyle::XRateLimit),
            "ietf" => Some(HeaderStyle::Ietf),
            "both" => Some(HeaderStyle::Both),
            "none" => Some(HeaderStyle::None),
            _ => None,
        })
    });
    let retry_after = object.get("retry_after").map_or(Some(base.retry_after), |node| node.boolean());
    let set = object.get("set").map_or_else(|| Some(Vec::new()), read_set);
    let (own, mut all) = (set?, base.set.clone());
    all.retain(|(name, _)| own.iter().all(|(other, _)| other != name));
    all.extend(own);
    Some(Style { reply: reply?, headers: headers?, retry_after: retry_after?, set: all })
}

/// Reads `failure_response`.
pub fn read_unavailable(node: Node<'_>) -> Option<Reply> {
    let object = node.object(&["status", "body", "content_type", "grpc_status"])?;
    read_fields(|name| object.get(name), &Reply::unavailable())
}

fn read_fields<'a>(get: impl Fn(&str) -> Option<Node<'a>>, base: &Reply) -> Option<Reply> {
    let status = get("status")
        .map_or(Some(base.status), |node| node.integer(400..=599).and_then(|status| u16::try_from(status).ok()));
    let body = get("body").map_or_else(
        || Some(base.body.clone()),
        |node| {
            let what = "a text of at most 65536 bytes";
            node.parsed(what, |text| (text.len() <= LONGEST_BODY).then(|| text.to_owned()))
        },
    );
    let content_type = get("content_type").map_or_else(
        || Some(base.content_type.clone()),
        |node| {
            let what = "a content type, such as \"application/json\"";
            node.parsed(what, |text| (text.contains('/') && is_value(text)).then(|| Some(text.to_owned())))
        },
    );
    let grpc_status = get("grpc_status")
        .map_or(Some(base.grpc_status), |node| node.integer(1..=16).and_then(|status| u8::try_from(status).ok()));
    Some(Reply { status: status?, body: body?, content_type: content_type?, grpc_status: grpc_status? })
}

fn read_set(node: Node<'_>) -> Option<Vec<(String, String)>> {
    let mut all = Some(Vec::new());
    for (name, node) in node.fields("an object of headers and their values")? {
        let lower = header_name(name).filter(|name| {
            !matches!(name.as_str(), "content-length" | "content-type" | "transfer-encoding" | "connection")
        });
        if lower.is_none() {
            node.fault("expected the name of a header that is not content-type (there is a field for it), content-length, transfer-encoding or connection".to_owned());
        }
        let value = node.parsed("the value of a header, of printable ASCII characters", |text| {
            is_value(text).then(|| text.to_owned())
        });
        all = match (all, lower.zip(value)) {
            (Some(mut all), Some(header)) => {
                all.push(header);
                Some(all)
            }
            _ => None,
        };
    }
    all
}

/// Whether a text can be the value of a header: printable ASCII, no blank at either end.
fn is_value(text: &str) -> bool {
    !text.is_empty() && text.trim() == text && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
}
