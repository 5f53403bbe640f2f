//! Bytes in, RESP2 replies out, however the bytes are cut.
//!
//! Invariant: what is kept never grows beyond [`MAX_REPLY`] bytes and one chunk, and nothing recurses into what the
//! other side sent. A reply is measured before it is parsed: its length, the number of its elements and its depth.
//! Nothing that the filter asks for is answered by a list inside a list, so that is refused before the parser, which
//! would recurse, sees it.
//!
//! Follows the RESP2 specification of Redis; the parser is the crate `redis-protocol`.

use bytes::{Buf, BytesMut};
use redis_protocol::resp2::decode::decode_bytes_mut;
pub use redis_protocol::resp2::types::BytesFrame as Reply;

/// The longest reply that is put together, in bytes. The answers of bucket.lua have fewer than a hundred; error texts
/// may be longer.
pub const MAX_REPLY: usize = 16 * 1024;

/// The most elements that a reply may have.
const MAX_ELEMENTS: i64 = 64;

/// Why the bytes are not a reply to anything that was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A reply began with a byte that no RESP2 type has.
    UnknownType(u8),
    /// A length was no number, or a line had no proper end.
    Malformed,
    /// A list inside a list.
    Nested,
    /// Too long, or too many elements.
    TooLong,
}

impl Violation {
    /// The violation in words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownType(_) => "bytes that are not RESP2",
            Self::Malformed => "a malformed RESP2 reply",
            Self::Nested => "a nested reply",
            Self::TooLong => "a reply that is too long",
        }
    }
}

/// Puts replies together from the pieces in which they come.
#[derive(Debug, Default)]
pub struct Replies {
    buffer: BytesMut,
}

impl Replies {
    /// Takes in the next piece of the stream.
    pub fn push(&mut self, piece: &[u8]) {
        self.buffer.extend_from_slice(piece);
    }

    /// The next whole reply, or `None` until more bytes have come.
    ///
    /// # Errors
    /// A [`Violation`]; the stream is then out of step and of no more use.
    pub fn take(&mut self) -> Result<Option<Reply>, Violation> {
        if measure(&self.buffer)?.is_none() {
            return Ok(None);
        }
        match decode_bytes_mut(&mut self.buffer) {
            Ok(Some((reply, _, _))) => Ok(Some(reply)),
            // It was measured whole, so the two readings disagree.
            Ok(None) | Err(_) => Err(Violation::Malformed),
        }
    }

    /// Forgets a stream's remains.
    pub fn clear(&mut self) {
        self.buffer = BytesMut::new();
    }

    #[cfg(test)]
    fn buffered(&self) -> usize {
        self.buffer.len()
    }
}

/// The length of the first reply in `bytes`, or `None` where its end has not come.
fn measure(bytes: &[u8]) -> Result<Option<usize>, Violation> {
    let mut rest = bytes;
    let mut left: i64 = 1;
    let mut inside = false;
    while left > 0 {
        let Some((kind, line)) = take_line(&mut rest)? else {
            return if bytes.len() > MAX_REPLY { Err(Violation::TooLong) } else { Ok(None) };
        };
        match kind {
            b'+' | b'-' | b':' => {}
            b'$' => {
                let length = number(line)?;
                if length > MAX_REPLY as i64 {
                    return Err(Violation::TooLong);
                }
                if let Ok(length) = usize::try_from(length) {
                    let Some((_, after)) = rest.split_at_checked(length) else {
                        return Ok(None);
                    };
                    // The parser takes any two bytes for the end of the line.
                    match after {
                        [b'\r', b'\n', ..] => {}
                        [] | [b'\r'] => return Ok(None),
                        _ => return Err(Violation::Malformed),
                    }
                    rest.advance(length.saturating_add(2));
                }
            }
            b'*' if inside => return Err(Violation::Nested),
            b'*' => {
                inside = true;
                let elements = number(line)?;
                if elements > MAX_ELEMENTS {
                    return Err(Violation::TooLong);
                }
                left = left.saturating_add(elements.max(0));
            }
            other => return Err(Violation::UnknownType(other)),
        }
        left = left.saturating_sub(1);
    }
    let length = bytes.len().saturating_sub(rest.len());
    if length > MAX_REPLY { Err(Violation::TooLong) } else { Ok(Some(length)) }
}

/// Takes a type byte and the rest of its line off the front.
fn take_line<'a>(rest: &mut &'a [u8]) -> Result<Option<(u8, &'a [u8])>, Violation> {
    let Some((kind, after)) = rest.split_first() else {
        return Ok(None);
    };
    if !matches!(kind, b'+' | b'-' | b':' | b'$' | b'*') {
        return Err(Violation::UnknownType(*kind));
    }
    let Some(end) = after.iter().position(|byte| *byte == b'\n') else {
        return Ok(None);
    };
    let (line, next) = after.split_at(end);
    let line = line.strip_suffix(b"\r").ok_or(Violation::Malformed)?;
    *rest = next.get(1..).unwrap_or_default();
    Ok(Some((*kind, line)))
}

fn number(line: &[u8]) -> Result<i64, Violation> {
    std::str::from_utf8(line)
        .ok()
        .and_then(|text| text.parse::<i64>().ok())
        .filter(|number| *number >= -1)
        .ok_or(Violation::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(replies: &mut Replies) -> Result<Vec<Reply>, Violation> {
        let mut found = Vec::new();
        while let Some(reply) = replies.take()? {
            found.push(reply);
        }
        Ok(found)
    }

    const STREAM: &[u8] =
        b"*4\r\n:1\r\n:9\r\n:0\r\n:1000\r\n-NOSCRIPT No matching script.\r\n+OK\r\n$3\r\na\r\n\r\n$-1\r\n*0\r\n:-7\r\n*-1\r\n";

    #[test]
    fn a_stream_means_the_same_however_it_is_cut() {
        let mut whole = Replies::default();
        whole.push(STREAM);
        let expected = all(&mut whole).unwrap();
        assert_eq!(expected.len(), 8);
        assert_eq!(whole.buffered(), 0);

        let mut bytewise = Replies::default();
        let mut found = Vec::new();
        for byte in STREAM {
            bytewise.push(&[*byte]);
            found.extend(all(&mut bytewise).unwrap());
        }
        assert_eq!(found, expected);

        for cut in 0..=STREAM.len() {
            let (head, tail) = STREAM.split_at(cut);
            let mut replies = Replies::default();
            replies.push(head);
            let mut found = all(&mut replies).unwrap();
            replies.push(tail);
            found.extend(all(&mut replies).unwrap());
            assert_eq!(found, expected, "cut at {cut}");
        }
    }

    #[test]
    fn what_is_not_a_reply_is_refused_by_name() {
        let cases: &[(&[u8], Violation)] = &[
            (b"HTTP/1.1 400 Bad Request\r\n", Violation::UnknownType(b'H')),
            (b"%1\r\n", Violation::UnknownType(b'%')),
            (b"\0\0\0", Violation::UnknownType(0)),
            (b"*1\r\n!\r\n", Violation::UnknownType(b'!')),
            (b"*x\r\n", Violation::Malformed),
            (b"*-2\r\n", Violation::Malformed),
            (b"$99999999999999999999\r\n", Violation::Malformed),
            (b":x\r\n", Violation::Malformed),
            (b"+OK\n", Violation::Malformed),
            (b"$1\r\nabc", Violation::Malformed),
            (b"*1\r\n*1\r\n:1\r\n", Violation::Nested),
            (b"*65\r\n", Violation::TooLong),
            (b"$16385\r\n", Violation::TooLong),
        ];
        for (bytes, violation) in cases {
            let mut replies = Replies::default();
            replies.push(bytes);
            assert_eq!(all(&mut replies), Err(*violation), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn a_reply_nested_twenty_thousand_deep_is_refused_at_its_second_level() {
        let deep = b"*1\r\n".repeat(20_000);
        let mut replies = Replies::default();
        replies.push(&deep);
        assert_eq!(all(&mut replies), Err(Violation::Nested));
    }

    #[test]
    fn a_reply_that_never_ends_is_refused_before_it_fills_memory() {
        let endless: &[(&[u8], &[u8])] =
            &[(b"+", b"aaaaaaaa"), (b"*64\r\n", b"+aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"), (b"$16000\r\n", b"a")];
        for (start, more) in endless {
            let mut replies = Replies::default();
            replies.push(start);
            let mut most = 0;
            let end = loop {
                match replies.take() {
                    Ok(Some(reply)) => panic!("{reply:?}"),
                    Ok(None) => replies.push(more),
                    Err(violation) => break violation,
                }
                most = most.max(replies.buffered());
            };
            assert!(matches!(end, Violation::TooLong | Violation::Malformed));
            assert!(most <= MAX_REPLY + more.len(), "{most}");
        }
    }
}
