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
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::LazyLock;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use redis_protocol::resp2::types::{BytesFrame, FrameKind, Resp2Frame};

use crate::quota::{Cost, Limit, MAX_UNITS};

/// The script itself, in Lua 5.1. Its header describes arguments, reply and stored state.
pub const SOURCE: &str = include_str!("../lua/bucket.lua");

static SHA1: LazyLock<String> = LazyLock::new(|| sha1_smol::Sha1::from(SOURCE).digest().to_string());

/// The SHA-1 of [`SOURCE`] in 40 lower-case hexadecimal digits: the name EVALSHA calls it by.
pub fn sha1() -> &'static str {
    &SHA1
}

/// One invocation of the script, encoded.
///
/// It is small, costs one allocation to keep and none to clone, and can be sent more than once: first by
/// [`evalsha`](Self::evalsha) and, only after a NOSCRIPT error, by [`eval`](Self::eval).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// How many keys there are, and so how many limits.
    limits: usize,
    asked: NonZeroU32,
    /// Every argument after the number of keys, as RESP bulk strings.
    arguments: Bytes,
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
        limits: impl IntoIterator<Item = (K, Limit)>,
        cost: Cost,
        count: NonZeroU32,
        now_ms: Option<u64>,
    ) -> Self {
        Self::encode(limits, cost, count, i64::from(count.get()), now_ms)
    }

    /// Gives back `count` charges of `cost` tokens that had been granted, to those of the buckets that still have
    /// a key. One that has none is full already. No bucket is filled beyond its capacity.
    ///
    /// The arguments are those of [`charge`](Self::charge). The reply is [`Outcome::Granted`] with all of `count`.
    pub fn give_back<K: AsRef<[u8]>>(
        limits: impl IntoIterator<Item = (K, Limit)>,
        cost: Cost,
        count: NonZeroU32,
        now_ms: Option<u64>,
    ) -> Self {
        Self::encode(limits, cost, count, -i64::from(count.get()), now_ms)
    }

    fn encode<K: AsRef<[u8]>>(
        limits: impl IntoIterator<Item = (K, Limit)>,
        cost: Cost,
        asked: NonZeroU32,
        signed_count: i64,
        now_ms: Option<u64>,
    ) -> Self {
        let mut keys = BytesMut::with_capacity(256);
        let mut numbers = BytesMut::with_capacity(128);
        // A time that a Lua number cannot hold is cut, like a time of the far future in a bucket.
        decimal(&mut numbers, now_ms.unwrap_or(0).min(MAX_UNITS));
        decimal(&mut numbers, cost.get());
        decimal(&mut numbers, signed_count);
        let mut count = 0;
        for (key, limit) in limits {
            count += 1;
            bulk(&mut keys, key.as_ref());
            decimal(&mut numbers, limit.capacity().get());
            decimal(&mut numbers, limit.refill().tokens());
            decimal(&mut numbers, limit.refill().period_ms());
        }
        keys.put_slice(&numbers);
        Self { limits: count, asked, arguments: keys.freeze() }
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
        // Name, script, number of keys, now, cost, count; then a key and three numbers for each limit.
        let length = 6 + 4 * self.limits;
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

fn bulk(out: &mut BytesMut, bytes: &[u8]) {
    header(out, b'$', bytes.len());
    out.put_slice(bytes);
    out.put_slice(b"\r\n");
}

fn decimal(out: &mut BytesMut, number: impl fmt::Display) {
    bulk(out, number.to_string().as_bytes());
}

fn header(out: &mut BytesMut, kind: u8, length: usize) {
    out.put_u8(kind);
    out.put_slice(length.to_string().as_bytes());
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
        refused: Option<Duration>,
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
    /// Which limit bound.
    Limit,
}

/// A reply that this script does not give. The stream it came from is not to be trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnexpectedReply {
    /// Not an array but something else, such as an error.
    NotAnArray(FrameKind),
    /// An array of so many elements, and not of five.
    NotFive(usize),
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
            Self::NotFive(length) => write!(f, "expected five elements, found {length}"),
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
    /// Reads the reply to a call that asked for `asked` charges against so many limits.
    ///
    /// # Errors
    /// [`UnexpectedReply`] for anything but five integers that the script can have answered this call with. Error
    /// replies are among them, so look for those first.
    pub fn from_reply(reply: &BytesFrame, asked: NonZeroU32, limits: usize) -> Result<Self, UnexpectedReply> {
        let BytesFrame::Array(elements) = reply else {
            return Err(UnexpectedReply::NotAnArray(reply.kind()));
        };
        let [granted, remaining, retry_after, reset_after, limit] = elements.as_slice() else {
            return Err(UnexpectedReply::NotFive(elements.len()));
        };
        let granted = in_range(Field::Granted, granted, u64::from(asked.get()))?;
        let granted = u32::try_from(granted).unwrap_or(asked.get());
        let remaining = in_range(Field::Remaining, remaining, MAX_UNITS)?;
        let retry_after_ms = integer(Field::RetryAfter, retry_after)?;
        let reset_after = in_range(Field::ResetAfter, reset_after, MAX_UNITS)?;
        let last =
            u64::try_from(limits).ok().and_then(|limits| limits.checked_sub(1)).ok_or_else(|| {
                match integer(Field::Limit, limit) {
                    Ok(value) => UnexpectedReply::OutOfRange(Field::Limit, value),
                    Err(unexpected) => unexpected,
                }
            })?;
        let limit = in_range(Field::Limit, limit, last)?;
        let standing = Standing {
            limit: usize::try_from(limit).unwrap_or(0),
            remaining,
            reset_after: Duration::from_millis(reset_after),
        };
        let wait = match retry_after_ms {
            -1 => Wait::Never,
            _ => match NonZeroU64::new(in_range(Field::RetryAfter, retry_after, MAX_UNITS)?) {
                None => Wait::None,
                Some(ms) => Wait::For(Duration::from_millis(ms.get())),
            },
        };
        match (NonZeroU32::new(granted), wait) {
            (Some(granted), Wait::None) if granted == asked => Ok(Self::Granted { granted, refused: None, standing }),
            (Some(granted), Wait::For(wait)) if granted < asked => {
                Ok(Self::Granted { granted, refused: Some(wait), standing })
            }
            (None, Wait::For(retry_after)) => Ok(Self::Denied { retry_after, standing }),
            (None, Wait::Never) => Ok(Self::Never { standing }),
            _ => Err(UnexpectedReply::Contradiction { asked, granted, retry_after_ms }),
        }
    }
}

enum Wait {
    None,
    For(Duration),
    Never,
}

fn integer(field: Field, frame: &BytesFrame) -> Result<i64, UnexpectedReply> {
    match frame {
        BytesFrame::Integer(value) => Ok(*value),
        other => Err(UnexpectedReply::NotAnInteger(field, other.kind())),
    }
}

/// An integer of 0 to `most`.
fn in_range(field: Field, frame: &BytesFrame, most: u64) -> Result<u64, UnexpectedReply> {
    let value = integer(field, frame)?;
    match u64::try_from(value) {
        Ok(number) if number <= most => Ok(number),
        _ => Err(UnexpectedReply::OutOfRange(field, value)),
    }
}
