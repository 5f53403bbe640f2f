//! The script that keeps the buckets: how it is called, and what its replies mean.
//!
//! A [`Call`] is what one invocation says to Redis, encoded once; it is sent as EVALSHA, and again as EVAL where
//! Redis does not know the script yet. An [`Outcome`] is what Redis answered.
//!
//! Invariant: whatever Redis sends becomes an outcome that cannot contradict itself, or an [`UnexpectedReply`].
//! A denial is an outcome; an error reply never is.
//!
//! This module does not know how keys are made, when to call, or over what the bytes travel.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use redis_protocol::resp2::types::{BytesFrame, FrameKind, Resp2Frame};

use crate::quota::{Cost, Limit, MAX_UNITS};

/// The script itself, in Lua 5.1. Its header describes arguments, reply and stored state.
pub const SOURCE: &str = include_str!("../lua/bucket.lua");

/// The longest time in a reply, which is also the largest integer that Lua counts exactly.
const MAX_MS: i64 = MAX_UNITS as i64;

static SHA1: LazyLock<String> = LazyLock::new(|| sha1_smol::Sha1::from(SOURCE).digest().to_string());

/// The SHA-1 of [`SOURCE`] in 40 lower-case hexadecimal digits: the name EVALSHA calls it by.
pub fn sha1() -> &'static str {
    &SHA1
}

/// One invocation of the script, encoded.
///
/// It is small, costs one allocation to keep, and can be sent more than once: first by [`evalsha`](Self::evalsha) and, only
/// after a NOSCRIPT error, by [`eval`](Self::eval).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// How many keys there are, and so how many limits.
    limits: usize,
    asked: NonZeroU32,
    /// How many words there are after the number of keys.
    words: usize,
    /// Every argument after the number of keys, as RESP bulk strings.
    arguments: Vec<u8>,
}

impl Call {
    /// Asks for `count` charges of `cost` tokens, each of which is taken from the buckets of all limits or of none.
    ///
    /// Each limit comes with the key of its bucket. The keys must differ and, on a Redis Cluster, share a hash
    /// slot. Without any limit the call can only be answered by an error.
    ///
    /// `now_ms` is the caller's clock, in milliseconds since the Unix epoch; `None`, or a zero, leaves the time to
    /// Redis, which is what keeps the callers' clocks out of it.
    pub fn charge<K: AsRef<[u8]>>(
        limits: impl IntoIterator<Item = (K, Limit), IntoIter: Clone>,
        cost: Cost,
        count: NonZeroU32,
        now_ms: Option<u64>,
    ) -> Self {
        Self::encode(limits.into_iter(), cost, count, i64::from(count.get()), now_ms)
    }

    /// Gives back `count` charges of `cost` tokens that had been granted, to those of the buckets that still have
    /// a key. One that has none is full already. No bucket is filled beyond its capacity.
    ///
    /// The arguments are those of [`charge`](Self::charge). The reply is [`Outcome::Granted`] with all of `count`.
    pub fn give_back<K: AsRef<[u8]>>(
        limits: impl IntoIterator<Item = (K, Limit), IntoIter: Clone>,
        cost: Cost,
        count: NonZeroU32,
        now_ms: Option<u64>,
    ) -> Self {
        Self::encode(limits.into_iter(), cost, count, -i64::from(count.get()), now_ms)
    }

    fn encode<K: AsRef<[u8]>>(
        limits: impl Iterator<Item = (K, Limit)> + Clone,
        cost: Cost,
        asked: NonZeroU32,
        signed_count: i64,
        now_ms: Option<u64>,
    ) -> Self {
        let mut arguments = Vec::with_capacity(192);
        let mut count = 0;
        for (key, _) in limits.clone() {
            count += 1;
            bulk(&mut arguments, key.as_ref());
        }
        for (_, limit) in limits {
            decimal(&mut arguments, limit.capacity().get());
            decimal(&mut arguments, limit.refill().tokens());
            decimal(&mut arguments, limit.refill().period_ms());
        }
        // A time that a Lua number cannot hold is cut, like a time of the far future in a bucket.
        let now_ms = now_ms.unwrap_or(0).min(MAX_UNITS);
        let unusual = [now_ms != 0, cost != Cost::ONE, signed_count != 1];
        let rest = unusual.iter().rposition(|unusual| *unusual).map_or(0, |last| last + 1);
        if rest > 0 {
            decimal(&mut arguments, now_ms);
        }
        if rest > 1 {
            decimal(&mut arguments, cost.get());
        }
        if rest > 2 {
            decimal(&mut arguments, signed_count);
        }
        Self { limits: count, asked, words: 4 * count + rest, arguments }
    }

    /// Appends the call by the script's name: the EVALSHA command, in RESP2.
    pub fn evalsha(&self, out: &mut BytesMut) {
        self.command(out, b"EVALSHA", sha1().as_bytes());
    }

    /// Appends the call with the whole script: the EVAL command, in RESP2. It also makes Redis remember the script.
    pub fn eval(&self, out: &mut BytesMut) {
        self.command(out, b"EVAL", SOURCE.as_bytes());
    }

    /// How many charges the call asks for, or gives back.
    pub fn asked(&self) -> NonZeroU32 {
        self.asked
    }

    /// How many limits, and so keys, the call has.
    pub fn limits(&self) -> usize {
        self.limits
    }

    fn command(&self, out: &mut BytesMut, name: &[u8], script: &[u8]) {
        // Name, script and number of keys come first.
        let length = self.words + 3;
        out.reserve(self.arguments.len() + script.len() + 64);
        header(out, b'*', length);
        bulk(out, name);
        bulk(out, script);
        decimal(out, self.limits);
        out.put_slice(&self.arguments);
    }
}

// Three lines of RESP are written here and not by redis-protocol, whose encoder has errors to be handled although a
// bulk string cannot fail, and which on a 32-bit target such as wasm32 misjudges the length of an integer beyond
// 2^32. The tests read the result with that crate.

fn bulk(out: &mut impl BufMut, bytes: &[u8]) {
    header(out, b'$', bytes.len());
    out.put_slice(bytes);
    out.put_slice(b"\r\n");
}

fn decimal(out: &mut impl BufMut, number: impl itoa::Integer) {
    bulk(out, itoa::Buffer::new().format(number).as_bytes());
}

fn header(out: &mut impl BufMut, kind: u8, length: usize) {
    out.put_u8(kind);
    out.put_slice(itoa::Buffer::new().format(length).as_bytes());
    out.put_slice(b"\r\n");
}

/// What the buckets of one call said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// So many charges were taken: all that were asked for, or those that fitted.
    Granted {
        /// 1 up to the number that was asked for.
        granted: NonZeroU32,
        /// Where some were refused: the time, in whole milliseconds from 1, until one more charge fits every limit.
        retry_after: Option<Duration>,
        /// The limit that bound.
        standing: Standing,
    },
    /// Nothing was taken, and one charge will fit later.
    Denied {
        /// The time until one charge fits every limit, in whole milliseconds from 1, if nobody else takes any: who
        /// waits that long is granted, who waits a millisecond less is not.
        retry_after: Duration,
        /// The limit that takes longest.
        standing: Standing,
    },
    /// Nothing was taken, and no wait helps: one charge costs more than a full bucket holds.
    Never {
        /// The first limit that is too small.
        standing: Standing,
    },
}

/// How the bucket stands that bound the outcome: the one with the longest wait where a charge was refused, and the
/// one with the least left, relative to its capacity, where all were granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Which of the call's limits, from 0.
    pub limit: usize,
    /// Whole tokens left after this call.
    pub remaining: u64,
    /// The time until the bucket is full, in whole milliseconds, rounded up.
    pub reset_after: Duration,
}

/// One integer of the reply, in the order in which they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// How many charges were taken.
    Granted,
    /// Whole tokens left.
    Remaining,
    /// Milliseconds until one more charge fits, 0 where all were granted, -1 for never.
    RetryAfter,
    /// Milliseconds until the bucket is full.
    ResetAfter,
    /// Which limit bound, where it is not the first.
    Limit,
}

/// A reply that this script does not give. The stream it came from is not to be trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnexpectedReply {
    /// Not an array but something else, such as an error.
    NotAnArray(FrameKind),
    /// An array of so many elements, and not of four or five.
    Length(usize),
    /// An element that is no integer.
    NotAnInteger(Field, FrameKind),
    /// An integer out of its range.
    OutOfRange(Field, i64),
    /// Integers that are in range and contradict each other.
    Contradiction {
        /// How many charges the call asked for.
        asked: NonZeroU32,
        /// How many the reply says were taken.
        granted: u32,
        /// The wait in the reply, which is 0 exactly when all were granted, and -1 only where none was.
        retry_after_ms: i64,
    },
}

impl fmt::Display for UnexpectedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAnArray(kind) => write!(f, "expected an array, found {kind:?}"),
            Self::Length(length) => write!(f, "expected four or five elements, found {length}"),
            Self::NotAnInteger(field, kind) => {
                write!(f, "{field:?}: expected an integer, found {kind:?}")
            }
            Self::OutOfRange(field, value) => write!(f, "{field:?}: {value} is out of range"),
            Self::Contradiction { asked, granted, retry_after_ms } => {
                write!(f, "{granted} of {asked} granted does not go with a wait of {retry_after_ms} ms")
            }
        }
    }
}

impl std::error::Error for UnexpectedReply {}

impl Outcome {
    /// How the bucket stands that bound it.
    pub const fn standing(&self) -> &Standing {
        match self {
            Self::Granted { standing, .. } | Self::Denied { standing, .. } | Self::Never { standing } => standing,
        }
    }

    /// What became of one charge of those that a call asked for, by its place among them, from 0: those that came first were
    /// granted. The bucket stands as it did after all of them.
    pub fn of_one(&self, place: usize) -> Self {
        match *self {
            Self::Granted { granted, retry_after: Some(retry_after), standing } if place >= granted.get() as usize => {
                Self::Denied { retry_after, standing }
            }
            Self::Granted { standing, .. } => Self::Granted { granted: NonZeroU32::MIN, retry_after: None, standing },
            denied => denied,
        }
    }

    /// Reads the reply to a call that asked for `asked` charges against so many limits.
    ///
    /// # Errors
    /// [`UnexpectedReply`] for anything but integers that the script can have answered this call with. Error
    /// replies are among them, so look for those first.
    pub fn from_reply(reply: &BytesFrame, asked: NonZeroU32, limits: usize) -> Result<Self, UnexpectedReply> {
        let BytesFrame::Array(elements) = reply else {
            return Err(UnexpectedReply::NotAnArray(reply.kind()));
        };
        let (granted, remaining, retry_after, reset_after, limit) = match elements.as_slice() {
            [granted, remaining, retry_after, reset_after] => (granted, remaining, retry_after, reset_after, None),
            [granted, remaining, retry_after, reset_after, limit] => {
                (granted, remaining, retry_after, reset_after, Some(limit))
            }
            _ => return Err(UnexpectedReply::Length(elements.len())),
        };
        let granted = in_range(Field::Granted, granted, |&it: &u32| it <= asked.get())?;
        let remaining = in_range(Field::Remaining, remaining, |&it| it <= MAX_UNITS)?;
        let retry_after_ms: i64 = in_range(Field::RetryAfter, retry_after, |it| (-1..=MAX_MS).contains(it))?;
        let reset_after = in_range(Field::ResetAfter, reset_after, |&it| it <= MAX_UNITS)?;
        let limit = match limit {
            Some(limit) => in_range(Field::Limit, limit, |it| (1..limits).contains(it))?,
            None => 0,
        };
        let standing = Standing { limit, remaining, reset_after: Duration::from_millis(reset_after) };
        // Only -1 is below zero.
        let retry_after = u64::try_from(retry_after_ms).map(Duration::from_millis);
        match (NonZeroU32::new(granted), retry_after) {
            (Some(granted), Ok(Duration::ZERO)) if granted == asked => {
                Ok(Self::Granted { granted, retry_after: None, standing })
            }
            (Some(granted), Ok(wait)) if granted < asked && !wait.is_zero() => {
                Ok(Self::Granted { granted, retry_after: Some(wait), standing })
            }
            (None, Ok(retry_after)) if !retry_after.is_zero() => Ok(Self::Denied { retry_after, standing }),
            (None, Err(_)) => Ok(Self::Never { standing }),
            _ => Err(UnexpectedReply::Contradiction { asked, granted, retry_after_ms }),
        }
    }
}

fn integer(field: Field, frame: &BytesFrame) -> Result<i64, UnexpectedReply> {
    match frame {
        BytesFrame::Integer(value) => Ok(*value),
        other => Err(UnexpectedReply::NotAnInteger(field, other.kind())),
    }
}

fn in_range<T: TryFrom<i64>>(
    field: Field,
    frame: &BytesFrame,
    allowed: impl FnOnce(&T) -> bool,
) -> Result<T, UnexpectedReply> {
    let value = integer(field, frame)?;
    T::try_from(value).ok().filter(allowed).ok_or(UnexpectedReply::OutOfRange(field, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::{Capacity, Refill};
    use bytes::Bytes;
    use redis_protocol::resp2::decode::decode_bytes;

    fn limit(capacity: u64, tokens: u64, period_ms: u64) -> Limit {
        let refill = Refill::new(tokens, period_ms).unwrap();
        Limit::new(Capacity::new(capacity).unwrap(), refill).unwrap()
    }

    fn count(count: u32) -> NonZeroU32 {
        NonZeroU32::new(count).unwrap()
    }

    fn text(write: impl FnOnce(&mut BytesMut)) -> String {
        let mut out = BytesMut::from("before ");
        write(&mut out);
        let text = String::from_utf8(out.to_vec()).unwrap();
        text.strip_prefix("before ").unwrap().to_owned()
    }

    #[test]
    fn a_call_is_one_command_by_name_or_with_the_source() {
        let call = Call::charge([("{a}:0", limit(100, 10, 1000))], Cost::ONE, count(3), None);
        let arguments = "$1\r\n1\r\n$5\r\n{a}:0\r\n$3\r\n100\r\n$1\r\n1\r\n$3\r\n100\r\n\
                         $1\r\n0\r\n$1\r\n1\r\n$1\r\n3\r\n";
        assert_eq!(text(|out| call.evalsha(out)), format!("*10\r\n$7\r\nEVALSHA\r\n$40\r\n{}\r\n{arguments}", sha1()));
        assert_eq!(
            text(|out| call.eval(out)),
            format!("*10\r\n$4\r\nEVAL\r\n${}\r\n{SOURCE}\r\n{arguments}", SOURCE.len())
        );
        assert_eq!((call.asked(), call.limits()), (count(3), 1));
    }

    #[test]
    fn what_is_usual_is_left_out_from_the_end() {
        let words = |cost, count, now_ms| {
            let cost = Cost::new(cost).unwrap();
            let text = text(|out| Call::charge([("a", limit(9, 1, 1))], cost, count, now_ms).evalsha(out));
            let (_, rest) = text.split_once("\r\na\r\n$1\r\n9\r\n$1\r\n1\r\n$1\r\n1\r\n").unwrap();
            let length = text.split_once("\r\n").unwrap().0.to_owned();
            format!(
                "{length} {}",
                rest.split("\r\n").filter(|line| !line.starts_with('$')).collect::<Vec<_>>().join(" ")
            )
        };
        assert_eq!(words(1, count(1), None), "*7 ");
        assert_eq!(words(1, count(1), Some(0)), "*7 ");
        assert_eq!(words(1, count(1), Some(5)), "*8 5 ");
        assert_eq!(words(2, count(1), None), "*9 0 2 ");
        assert_eq!(words(1, count(3), Some(5)), "*10 5 1 3 ");
    }

    #[test]
    fn keys_of_any_bytes_and_numbers_of_any_size_arrive_as_they_were() {
        let keys: [&[u8]; 3] = [b"*1\r\n$5 \xfe\xff", b"", "\u{20ac}".as_bytes()];
        let limits = [limit(MAX_UNITS, MAX_UNITS, 1), limit(28_542, 1, 315_576_000_000), limit(7, 1, 1)];
        let cost = Cost::new(MAX_UNITS).unwrap();
        let pairs = keys.into_iter().zip(limits);
        let call = Call::give_back(pairs, cost, NonZeroU32::MAX, Some(u64::MAX));
        let mut out = BytesMut::new();
        call.evalsha(&mut out);
        let out = out.freeze();
        let (frame, length) = decode_bytes(&out).unwrap().unwrap();
        assert_eq!(length, out.len());
        let expected: [&[u8]; 18] = [
            b"EVALSHA",
            sha1().as_bytes(),
            b"3",
            keys[0],
            keys[1],
            keys[2],
            b"9007199254740991",
            b"9007199254740991",
            b"1",
            b"28542",
            b"1",
            b"315576000000",
            b"7",
            b"1",
            b"1",
            b"9007199254740991",
            b"9007199254740991",
            b"-4294967295",
        ];
        let expected = expected.map(|it| BytesFrame::BulkString(Bytes::copy_from_slice(it)));
        assert_eq!(frame, BytesFrame::Array(expected.to_vec()));
    }

    fn read(reply: &str, asked: u32, limits: usize) -> Result<Outcome, UnexpectedReply> {
        let bytes = Bytes::copy_from_slice(reply.as_bytes());
        let (frame, length) = decode_bytes(&bytes).unwrap().unwrap();
        assert_eq!(length, bytes.len(), "{reply:?}");
        Outcome::from_reply(&frame, count(asked), limits)
    }

    /// A reply, in which a limit of 0 is not told.
    fn told(fields: [i64; 5]) -> String {
        let fields = if let [fields @ .., 0] = &fields { fields } else { fields.as_slice() };
        let integers = fields.iter().map(|field| format!(":{field}\r\n")).collect::<String>();
        format!("*{}\r\n{integers}", fields.len())
    }

    #[test]
    fn a_reply_is_granted_granted_in_part_denied_or_never() {
        let ms = Duration::from_millis;
        let standing = |limit, remaining, reset| Standing { limit, remaining, reset_after: ms(reset) };
        let most = 9_007_199_254_740_991;
        let cases = [
            (
                [3, 7, 0, 300, 1],
                Outcome::Granted { granted: count(3), retry_after: None, standing: standing(1, 7, 300) },
            ),
            (
                [2, 0, 1, 1000, 0],
                Outcome::Granted { granted: count(2), retry_after: Some(ms(1)), standing: standing(0, 0, 1000) },
            ),
            (
                [0, most, most, most, 0],
                Outcome::Denied { retry_after: ms(most as u64), standing: standing(0, most as u64, most as u64) },
            ),
            ([0, 5, -1, 0, 0], Outcome::Never { standing: standing(0, 5, 0) }),
        ];
        for (fields, outcome) in cases {
            assert_eq!(read(&told(fields), 3, 2), Ok(outcome));
        }
    }

    #[test]
    fn any_other_reply_is_an_error_that_says_what_was_found() {
        use Field::{Granted, Limit, Remaining, ResetAfter, RetryAfter};
        use UnexpectedReply::{Contradiction, Length, NotAnArray, NotAnInteger, OutOfRange};
        let too_much = 1 << 53;
        let contradiction = |granted, retry_after_ms| Contradiction { asked: count(3), granted, retry_after_ms };
        let cases = [
            ("+OK\r\n".to_owned(), NotAnArray(FrameKind::SimpleString)),
            ("-WRONGTYPE x\r\n".to_owned(), NotAnArray(FrameKind::Error)),
            (":1\r\n".to_owned(), NotAnArray(FrameKind::Integer)),
            ("$-1\r\n".to_owned(), NotAnArray(FrameKind::Null)),
            ("*0\r\n".to_owned(), Length(0)),
            ("*3\r\n:1\r\n:1\r\n:0\r\n".to_owned(), Length(3)),
            (told([1, 1, 0, 0, 1]).replace("*5", "*6") + ":0\r\n", Length(6)),
            ("*4\r\n$1\r\n3\r\n:1\r\n:0\r\n:0\r\n".to_owned(), NotAnInteger(Granted, FrameKind::BulkString)),
            ("*5\r\n:3\r\n:1\r\n:0\r\n:0\r\n*0\r\n".to_owned(), NotAnInteger(Limit, FrameKind::Array)),
            ("*5\r\n:3\r\n:1\r\n$-1\r\n:0\r\n:0\r\n".to_owned(), NotAnInteger(RetryAfter, FrameKind::Null)),
            (told([4, 0, 0, 0, 0]), OutOfRange(Granted, 4)),
            (told([-1, 0, 0, 0, 0]), OutOfRange(Granted, -1)),
            (told([1 << 32, 0, 0, 0, 0]), OutOfRange(Granted, 1 << 32)),
            (told([3, -1, 0, 0, 0]), OutOfRange(Remaining, -1)),
            (told([3, too_much, 0, 0, 0]), OutOfRange(Remaining, too_much)),
            (told([0, 0, -2, 0, 0]), OutOfRange(RetryAfter, -2)),
            (told([0, 0, too_much, 0, 0]), OutOfRange(RetryAfter, too_much)),
            (told([0, 0, i64::MIN, 0, 0]), OutOfRange(RetryAfter, i64::MIN)),
            (told([3, 0, 0, -1, 0]), OutOfRange(ResetAfter, -1)),
            (told([3, 0, 0, i64::MAX, 0]), OutOfRange(ResetAfter, i64::MAX)),
            (told([3, 0, 0, 0, 2]), OutOfRange(Limit, 2)),
            (told([3, 0, 0, 0, -1]), OutOfRange(Limit, -1)),
            ("*5\r\n:3\r\n:0\r\n:0\r\n:0\r\n:0\r\n".to_owned(), OutOfRange(Limit, 0)),
            (told([3, 0, 1, 0, 0]), contradiction(3, 1)),
            (told([3, 0, -1, 0, 0]), contradiction(3, -1)),
            (told([2, 0, 0, 0, 0]), contradiction(2, 0)),
            (told([2, 0, -1, 0, 0]), contradiction(2, -1)),
            (told([0, 0, 0, 0, 0]), contradiction(0, 0)),
        ];
        for (reply, error) in cases {
            assert_eq!(read(&reply, 3, 2), Err(error), "{reply:?}");
        }
        assert_eq!(read(&told([1, 0, 0, 0, 1]), 1, 1), Err(OutOfRange(Limit, 1)));
    }
}
