//! What others write around the lines of a log: container runtimes, `kubectl logs` and Compose.

use std::borrow::Cow;

use serde_json::Value;

/// The line within another, if that is what this is.
///
/// # Errors
/// That it is a part of one.
pub fn unwrapped(line: &str) -> Result<Option<Cow<'_, str>>, String> {
    Ok(match line.as_bytes().first() {
        // containerd and CRI-O: `2026-01-01T00:00:00.000000000Z stdout F ...`, and `P` for a part of a long line.
        Some(b'0'..=b'9') => {
            let mut parts = line.splitn(4, ' ');
            match (parts.next(), parts.next(), parts.next(), parts.next()) {
                (Some(_), Some("stdout" | "stderr"), Some("F"), Some(rest)) => Some(Cow::Borrowed(rest)),
                (Some(_), Some("stdout" | "stderr"), Some("P"), _) => {
                    return Err("it is a part of a line, which the container runtime has split".to_owned());
                }
                _ => None,
            }
        }
        // `kubectl logs --prefix`
        Some(b'[') if line.starts_with("[pod/") => line.split_once("] ").map(|(_, rest)| Cow::Borrowed(rest)),
        // Docker's `json-file`
        Some(b'{') if line.starts_with("{\"log\":") => {
            let kept = serde_json::from_str::<Value>(line).unwrap_or_default();
            let log = kept.get("log").and_then(Value::as_str).filter(|_| kept.get("stream").is_some());
            log.map(|log| Cow::Owned(log.to_owned()))
        }
        // `docker compose logs`: `name-1  | ...`
        Some(byte) if byte.is_ascii_alphanumeric() => line.split_once(" | ").and_then(|(name, rest)| {
            let is_name = name.trim_end().bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
            (is_name && rest.starts_with(['{', '['])).then_some(Cow::Borrowed(rest))
        }),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_out_of_what_others_write_around_it() {
        let cases = [
            ("2026-01-01T00:00:00.000000000Z stdout F [a] \"b\" c", Some("[a] \"b\" c")),
            ("2026-01-01T00:00:00.000000000+01:00 stderr F {\"a\": 1}", Some("{\"a\": 1}")),
            ("[pod/gateway-7f/istio-proxy] [a] b", Some("[a] b")),
            ("envoy-1  | [a] | b", Some("[a] | b")),
            ("my_app.envoy-2 | {\"a\": 1}", Some("{\"a\": 1}")),
            (r#"{"log":"[a] \"b\"\n","stream":"stdout","time":"2026-01-01T00:00:00Z"}"#, Some("[a] \"b\"\n")),
            (r#"{"log":"of a request","path":"/"}"#, None),
            ("[a] b", None),
            ("{\"a\": \"x | {\"}", None),
            ("a b | {", None),
            ("a | b", None),
            ("1 | 2 stdout F", None),
            ("", None),
        ];
        for (line, expected) in cases {
            assert_eq!(unwrapped(line), Ok(expected.map(Cow::from)), "{line}");
        }
        assert!(unwrapped("2026-01-01T00:00:00Z stdout P {\"a\": ").unwrap_err().contains("part of a line"));
    }
}
