//! The conversation with Redis over one stream, without I/O: bytes and time in, effects out.
//!
//! The rules, all of whose transitions are in this file:
//!
//! * Commands are pipelined. Replies belong to them first in, first out, one each. A reply that nothing waits for, or
//!   bytes that are not RESP, mean that the stream is out of step: it is closed and what waited fails.
//! * A call goes out as `EVALSHA`. On `NOSCRIPT`, and on nothing else, that one call is sent again, as `EVAL`. A call
//!   that timed out or was cut off may have been charged already and is never repeated.
//! * Every call has a deadline. Past it the call fails; its place in the queue stays, so that a late reply is matched
//!   to it and thrown away.
//! * Credentials come first on every stream, and no call is sent before they have been accepted.
//! * Calls that come while a connection is being made wait for it, within their own deadlines. After a failed attempt,
//!   until the next one, and while an attempt takes longer than a call may, they fail at once.
//! * At most `max_in_flight` calls are under way; the next one fails at once.
//! * A stream whose oldest reply is overdue by several timeouts is given up.
//!
//! Invariant: each call accepted by [`Exchange::call`] is answered by exactly one [`Effect::Answer`], at the latest in
//! the first [`Exchange::tick`] past its deadline.
//!
//! This module does not know what a call means, who waits for it, or what a stream is made of.

mod backoff;
mod failure;
mod replies;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use redis_protocol::resp2::encode::extend_encode_borrowed;
use redis_protocol::resp2::types::BorrowedFrame;

use self::backoff::Backoff;
use self::failure::ErrorReply;
pub use self::failure::{ErrorKind, Failure, printable};
pub use self::replies::{MAX_REPLY, Replies, Reply, Violation};
use crate::script::Call;

/// A stream is given up when its oldest reply is overdue by so many timeouts…
const STALLED_TIMEOUTS: u32 = 10;
/// …and by this at least, so that short timeouts do not make a slow server lose its connections as well.
const STALLED_AT_LEAST: Duration = Duration::from_millis(500);
/// A connection that lived so long has proved itself, even if it was never used.
const PROVEN_AFTER: Duration = Duration::from_secs(2);
/// So many ticks leave deadlines alone after the worker was away. What lies in its sockets takes a few turns through the
/// proxy's own connections until it is heard here.
const TICKS_AFTER_AWAY: u32 = 3;
/// The time between two ticks, as a share of the timeout, while calls are under way.
const TICKS_PER_TIMEOUT: u32 = 10;

/// What an exchange has to know.
#[derive(Clone)]
pub struct Settings {
    /// How long a call may take, from [`Exchange::call`] on.
    pub timeout: Duration,
    /// How many calls may be under way, those included whose reply is still owed after their deadline.
    pub max_in_flight: usize,
    /// Commands that open each stream, RESP2-encoded, each of which has to be answered by a status.
    pub greeting: Vec<Bytes>,
    /// Decides the jitter of reconnecting; should differ between workers.
    pub seed: u64,
}

/// The commands that open a stream: `AUTH` and `SELECT`, where configured.
pub fn greeting(username: Option<&str>, password: Option<&str>, database: u32) -> Vec<Bytes> {
    let mut commands = Vec::new();
    match (username, password) {
        (Some(username), Some(password)) => commands.push(command(&["AUTH", username, password])),
        (None, Some(password)) => commands.push(command(&["AUTH", password])),
        (_, None) => {}
    }
    if database != 0 {
        commands.push(command(&["SELECT", &database.to_string()]));
    }
    commands
}

fn command(words: &[&str]) -> Bytes {
    let words = words.iter().map(|word| BorrowedFrame::BulkString(word.as_bytes())).collect::<Vec<_>>();
    let mut encoded = BytesMut::new();
    // Fails only where a buffer of fixed size is too small, and this one grows.
    let _ = extend_encode_borrowed(&mut encoded, &BorrowedFrame::Array(&words), false);
    encoded.freeze()
}

/// What the owner of the exchange has to do, in order.
#[derive(Debug, PartialEq)]
pub enum Effect<T> {
    /// Open a stream, and report with [`Exchange::connected`] or [`Exchange::closed`] what became of it.
    Open,
    /// Send these bytes on the stream.
    Send(Bytes),
    /// Close the stream. Nothing that it still says is of interest.
    Close,
    /// The answer to a call.
    Answer {
        /// Who waits for it.
        who: T,
        /// The reply, which is no error, or why there is none.
        answer: Result<Reply, Failure>,
        /// The time from the call to its answer.
        took: Duration,
    },
}

/// Counts that only the exchange can see, each since the last [`Exchange::take_counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls whose script the server did not know, and that were sent again as `EVAL`.
    pub noscript: u64,
    /// Replies that came after their call's deadline.
    pub late: u64,
    /// Connections made after the first one, and logged in where that is wanted.
    pub reconnects: u64,
}

/// Where the stream is.
#[derive(Debug)]
enum Link {
    /// No stream. The next tick opens one; calls wait for it.
    Idle { since: Instant },
    /// No stream after a failed attempt. Calls fail at once, until a tick after `until`.
    Down { until: Instant, failure: Failure },
    /// The stream is being opened. Calls wait.
    Opening { since: Instant },
    /// Connected; so many commands of the greeting have still to be answered. Calls wait, so nothing else is owed.
    Greeting { since: Instant, left: usize },
    /// Calls are sent as they come.
    Ready { since: Instant, proven: bool },
}

/// A call and who waits for it.
#[derive(Debug)]
struct Waiting<T> {
    who: T,
    call: Call,
    /// When whoever waits for it began to: its deadline counts from here.
    since: Instant,
    /// When it was made.
    made: Instant,
}

/// How a call was put to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// By the script's digest: `EVALSHA`.
    Digest,
    /// With the whole script: `EVAL`.
    Source,
}

/// A reply that the stream owes.
#[derive(Debug)]
enum Owed<T> {
    /// To a call that still waits.
    Call(Waiting<T>, Form),
    /// To a call whose deadline has passed; it was made then.
    Nobody { made: Instant },
}

/// One conversation. `T` names who waits for a call.
#[derive(Debug)]
pub struct Exchange<T> {
    timeout: Duration,
    max_in_flight: usize,
    greeting: Vec<Bytes>,
    link: Link,
    /// Calls that have not been sent, oldest first.
    held: VecDeque<Waiting<T>>,
    /// Replies that the stream owes, in the order of their commands.
    owed: VecDeque<Owed<T>>,
    replies: Replies,
    backoff: Backoff,
    outbox: BytesMut,
    effects: VecDeque<Effect<T>>,
    counts: Counts,
    ever_ready: bool,
    /// When the worker last had a turn that reached this exchange.
    last_turn: Instant,
    /// How many ticks still leave deadlines to the next one. `None` where none does.
    postponed: Option<u32>,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The greeting holds the password.
        f.debug_struct("Settings")
            .field("timeout", &self.timeout)
            .field("max_in_flight", &self.max_in_flight)
            .finish_non_exhaustive()
    }
}

impl<T> Exchange<T> {
    /// An exchange without a stream; the first tick opens one.
    pub fn new(settings: Settings, now: Instant) -> Self {
        Self {
            timeout: settings.timeout,
            max_in_flight: settings.max_in_flight,
            greeting: settings.greeting,
            link: Link::Idle { since: now },
            held: VecDeque::new(),
            owed: VecDeque::new(),
            replies: Replies::default(),
            backoff: Backoff::new(settings.seed),
            outbox: BytesMut::new(),
            effects: VecDeque::new(),
            counts: Counts::default(),
            ever_ready: false,
            last_turn: now,
            postponed: None,
        }
    }

    /// Makes a call. Its answer comes as an [`Effect::Answer`] for `who`, who has been waiting since then.
    ///
    /// # Errors
    /// The failure, where it can be told at once: too many calls under way, or no connection and none being made in
    /// time. There is no effect then.
    pub fn call(&mut self, now: Instant, since: Instant, who: T, call: Call) -> Result<(), Failure> {
        if self.in_flight() >= self.max_in_flight {
            return Err(Failure::Overload);
        }
        if self.in_flight() == 0 {
            // Before the first call nothing asked for ticks, so the time until now says nothing about the worker.
            self.turn(now);
        }
        if self.backoff.used() && matches!(self.link, Link::Down { .. }) {
            // What the last attempt found was for nobody, and may be long past.
            self.link = Link::Idle { since: now };
        }
        let waiting = Waiting { who, call, since, made: now };
        match &self.link {
            Link::Ready { .. } => self.send(waiting),
            Link::Down { failure, .. } => return Err(failure.clone()),
            Link::Idle { since } | Link::Opening { since } | Link::Greeting { since, .. }
                if now.saturating_duration_since(*since) > self.timeout =>
            {
                return Err(Failure::error(ErrorKind::Unavailable, "connecting takes too long"));
            }
            Link::Idle { .. } | Link::Opening { .. } | Link::Greeting { .. } => self.held.push_back(waiting),
        }
        Ok(())
    }

    /// The stream that was asked for has reached the server.
    pub fn connected(&mut self, now: Instant) {
        let Link::Opening { .. } = self.link else {
            return;
        };
        for command in &self.greeting {
            self.outbox.extend_from_slice(command);
        }
        self.link = Link::Greeting { since: now, left: self.greeting.len() };
        self.greeted(now);
    }

    /// The server said something.
    pub fn received(&mut self, now: Instant, bytes: &[u8]) {
        if let Link::Idle { .. } | Link::Down { .. } = self.link {
            return;
        }
        self.turn(now);
        // A server may speak before the tunnel has reported that it is connected.
        self.connected(now);
        self.replies.push(bytes);
        loop {
            match self.replies.take() {
                Ok(None) => return,
                Ok(Some(reply)) => self.replied(now, reply),
                Err(violation) => self.give_up(now, Failure::error(ErrorKind::Protocol, violation.as_str())),
            }
            if let Link::Idle { .. } | Link::Down { .. } = self.link {
                return;
            }
        }
    }

    /// The stream is gone, or could not be opened, for a reason fit for a log line.
    pub fn closed(&mut self, now: Instant, reason: &str) {
        // The reason is often a word of the proxy's own; which of the two it was is plain from here.
        let what = match self.link {
            Link::Idle { .. } | Link::Down { .. } => return,
            Link::Opening { .. } => "cannot connect",
            Link::Greeting { .. } | Link::Ready { .. } => "the connection was closed",
        };
        self.lose(now, Failure::error(ErrorKind::Unavailable, &format!("{what}: {reason}")));
    }

    /// The owner of the exchange found that a reply answers something else than what was asked: the stream is out of
    /// step.
    pub fn distrust(&mut self, now: Instant, failure: Failure) {
        if let Link::Ready { .. } = self.link {
            self.give_up(now, failure);
        }
    }

    /// Time has passed: fails what is overdue, gives up a stream that stalls, opens one where there is none.
    pub fn tick(&mut self, now: Instant) {
        let patience = self.timeout.saturating_add(self.stalled_after());
        let overdue = |since: Instant| now.saturating_duration_since(since) > patience;
        let away = self.postponed.is_none() && self.worker_was_away(now);
        self.postponed = if away { Some(TICKS_AFTER_AWAY) } else { self.postponed };
        if let Some(left) = self.postponed.filter(|left| *left > 0) {
            self.postponed = Some(left.saturating_sub(1));
        } else {
            self.postponed = None;
            self.expire(now);
            if self.oldest_owed().is_some_and(overdue) {
                self.give_up(now, Failure::error(ErrorKind::Unavailable, "the server stopped answering"));
            }
        }
        self.last_turn = now;
        match &self.link {
            Link::Idle { .. } => self.open(now),
            Link::Down { until, .. } if now >= *until => self.open(now),
            Link::Greeting { since, .. } if overdue(*since) => {
                self.give_up(now, Failure::error(ErrorKind::Unavailable, "no answer to AUTH or SELECT"));
            }
            _ => {}
        }
    }

    /// When the next tick is wanted, from now on. `None` where nothing is under way.
    pub fn next_tick(&self, now: Instant) -> Option<Duration> {
        const SOON: Duration = Duration::from_millis(1);
        let down = match self.link {
            Link::Idle { .. } => return Some(SOON),
            Link::Down { until, .. } => Some(until.saturating_duration_since(now).max(SOON)),
            _ => None,
        };
        if self.in_flight() == 0 {
            return down;
        }
        let tick = self.tick_period();
        Some(down.map_or(tick, |down| down.min(tick)))
    }

    /// The next thing to do for the owner.
    pub fn next_effect(&mut self) -> Option<Effect<T>> {
        let answer = self.effects.pop_front();
        if answer.is_some() {
            return answer;
        }
        if self.outbox.is_empty() {
            return None;
        }
        Some(Effect::Send(self.outbox.split().freeze()))
    }

    /// Calls under way: held, sent, or past their deadline with a reply still owed.
    pub fn in_flight(&self) -> usize {
        self.held.len().saturating_add(self.owed.len())
    }

    /// Whether calls are sent as they come.
    pub fn is_ready(&self) -> bool {
        matches!(self.link, Link::Ready { .. })
    }

    /// What has been counted since the last time.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    fn open(&mut self, now: Instant) {
        self.replies.clear();
        self.outbox.clear();
        self.link = Link::Opening { since: now };
        self.effects.push_back(Effect::Open);
    }

    fn send(&mut self, waiting: Waiting<T>) {
        waiting.call.evalsha(&mut self.outbox);
        self.owed.push_back(Owed::Call(waiting, Form::Digest));
    }

    /// Becomes ready where the whole greeting has been answered.
    fn greeted(&mut self, now: Instant) {
        if let Link::Greeting { left: 0, .. } = self.link {
            self.link = Link::Ready { since: now, proven: false };
            if self.ever_ready {
                self.counts.reconnects = self.counts.reconnects.saturating_add(1);
            }
            self.ever_ready = true;
            while let Some(waiting) = self.held.pop_front() {
                self.send(waiting);
            }
        }
    }

    fn replied(&mut self, now: Instant, reply: Reply) {
        let sorted = match &reply {
            Reply::Error(text) => Some(ErrorReply::sort(text.as_bytes())),
            _ => None,
        };
        if let Link::Greeting { .. } = self.link {
            return self.greeting_replied(now, sorted);
        }
        match (self.owed.pop_front(), sorted) {
            (None, Some(ErrorReply::Failure(failure))) => self.give_up(now, failure),
            (None, _) => {
                self.give_up(now, Failure::error(ErrorKind::Protocol, "a reply that nothing waits for"));
            }
            (Some(Owed::Nobody { .. }), sorted) => {
                self.counts.late = self.counts.late.saturating_add(1);
                self.learn(now, sorted);
            }
            (Some(Owed::Call(waiting, Form::Digest)), Some(ErrorReply::NoScript)) => {
                self.counts.noscript = self.counts.noscript.saturating_add(1);
                waiting.call.eval(&mut self.outbox);
                self.owed.push_back(Owed::Call(waiting, Form::Source));
            }
            (Some(Owed::Call(waiting, Form::Source)), Some(ErrorReply::NoScript)) => {
                let failure = Failure::error(ErrorKind::Other, "NOSCRIPT in answer to EVAL");
                self.answer(now, waiting, Err(failure));
            }
            (Some(Owed::Call(waiting, _)), None) => {
                self.learn(now, None);
                self.answer(now, waiting, Ok(reply));
            }
            (Some(Owed::Call(waiting, _)), Some(ErrorReply::Failure(failure))) => {
                self.answer(now, waiting, Err(failure.clone()));
                self.learn(now, Some(ErrorReply::Failure(failure)));
            }
        }
    }

    fn greeting_replied(&mut self, now: Instant, error: Option<ErrorReply>) {
        match error {
            None => {
                if let Link::Greeting { left, .. } = &mut self.link {
                    *left = left.saturating_sub(1);
                }
                self.greeted(now);
            }
            Some(ErrorReply::Failure(failure)) => self.give_up(now, failure),
            Some(ErrorReply::NoScript) => {
                self.give_up(now, Failure::error(ErrorKind::Protocol, "NOSCRIPT in answer to AUTH or SELECT"));
            }
        }
    }

    /// What a reply to a call says about the connection: that it is good, or that it has to go.
    fn learn(&mut self, now: Instant, error: Option<ErrorReply>) {
        match error {
            None => {
                if let Link::Ready { proven, .. } = &mut self.link {
                    *proven = true;
                }
                self.backoff.reset();
            }
            Some(ErrorReply::Failure(Failure::Error { kind, cause })) if kind.retires_connection() => {
                self.give_up(now, Failure::Error { kind, cause });
            }
            Some(_) => {}
        }
    }

    fn answer(&mut self, now: Instant, waiting: Waiting<T>, answer: Result<Reply, Failure>) {
        let took = now.saturating_duration_since(waiting.made);
        self.effects.push_back(Effect::Answer { who: waiting.who, answer, took });
    }

    /// Fails the calls whose deadline would have passed by the next tick, so that none waits longer than that. They need not
    /// have begun to wait in the order in which they stand, so all are looked at.
    fn expire(&mut self, now: Instant) {
        let patience = self.timeout.saturating_sub(self.tick_period());
        let overdue = |waiting: &Waiting<T>| now.saturating_duration_since(waiting.since) > patience;
        while let Some(place) = self.held.iter().position(overdue) {
            if let Some(waiting) = self.held.remove(place) {
                self.answer(now, waiting, Err(Failure::Timeout));
            }
        }
        for owed in &mut self.owed {
            let made = match owed {
                Owed::Call(waiting, _) if overdue(waiting) => waiting.made,
                _ => continue,
            };
            if let Owed::Call(waiting, _) = std::mem::replace(owed, Owed::Nobody { made }) {
                let took = now.saturating_duration_since(made);
                let answer = Err(Failure::Timeout);
                self.effects.push_back(Effect::Answer { who: waiting.who, answer, took });
            }
        }
    }

    /// The worker has a turn, and has seen to its sockets.
    fn turn(&mut self, now: Instant) {
        self.last_turn = now;
        self.postponed = None;
    }

    /// Whether the worker itself has been away, so that replies may lie unread in its sockets. Deadlines wait for some
    /// more ticks then: what stalled was not Redis.
    fn worker_was_away(&self, now: Instant) -> bool {
        let usual = self.tick_period().saturating_mul(3).max(Duration::from_millis(20));
        self.in_flight() > 0 && now.saturating_duration_since(self.last_turn) > usual
    }

    fn oldest_owed(&self) -> Option<Instant> {
        self.owed.front().map(|owed| match owed {
            Owed::Call(waiting, _) => waiting.made,
            Owed::Nobody { made } => *made,
        })
    }

    fn tick_period(&self) -> Duration {
        (self.timeout / TICKS_PER_TIMEOUT).clamp(Duration::from_millis(1), Duration::from_millis(10))
    }

    fn stalled_after(&self) -> Duration {
        self.timeout.saturating_mul(STALLED_TIMEOUTS).max(STALLED_AT_LEAST)
    }

    /// Closes a stream that is of no more use.
    fn give_up(&mut self, now: Instant, failure: Failure) {
        self.effects.push_back(Effect::Close);
        self.lose(now, failure);
    }

    /// The stream is gone: what was sent fails, since it may have been charged. What was not sent waits for the next
    /// stream if that may follow at once, and fails otherwise.
    fn lose(&mut self, now: Instant, failure: Failure) {
        let proven = match self.link {
            Link::Ready { since, proven } => proven || now.saturating_duration_since(since) >= PROVEN_AFTER,
            _ => false,
        };
        self.replies.clear();
        self.outbox.clear();
        while let Some(owed) = self.owed.pop_front() {
            if let Owed::Call(waiting, _) = owed {
                self.answer(now, waiting, Err(failure.clone()));
            }
        }
        if proven {
            self.backoff.reset();
            self.link = Link::Idle { since: now };
            return;
        }
        while let Some(waiting) = self.held.pop_front() {
            self.answer(now, waiting, Err(failure.clone()));
        }
        let until = now.checked_add(self.backoff.next()).unwrap_or(now);
        self.link = Link::Down { until, failure };
    }
}

#[cfg(test)]
mod tests;
