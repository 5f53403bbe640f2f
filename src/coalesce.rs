//! Requests that want a bucket while it is being asked, so that they go to Redis as one call.
//!
//! The first asks at once. Those that come before it is answered wait, and then ask together, in the order in which they
//! came: a call asks for several charges, and is granted as many as fit. So a bucket that everybody wants costs Redis one call
//! a round trip, whatever the traffic, and each is answered as if it had asked for itself at that moment.
//!
//! Nobody waits here for longer than the patience, nor behind a call that has been under way for so long. Other buckets have
//! nothing to do with it.
//!
//! Invariant: a member is in one queue, until it [leaves](Queues::leave), or in one group that was handed out, until that is
//! [answered](Queues::answered).
//!
//! This module does not know what a member is, nor how Redis is asked.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The buckets that are being asked, and who waits for each.
#[derive(Debug)]
pub struct Queues<M> {
    patience: Duration,
    buckets: HashMap<Rc<str>, Bucket<M>>,
    /// How many wait in queues.
    queued: usize,
    /// How many are in groups that were handed out and are not answered.
    asking: usize,
}

#[derive(Debug)]
struct Bucket<M> {
    /// How many calls are under way, and since when the latest is.
    calls: usize,
    latest: Instant,
    queue: Vec<M>,
    /// When the first of the queue came.
    since: Instant,
}

impl<M> Bucket<M> {
    /// Whether nobody has to do with it.
    const fn is_unused(&self) -> bool {
        self.calls == 0 && self.queue.is_empty()
    }
}

/// Those who ask for a bucket now, in the order in which they came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group<M> {
    /// What they ask for.
    pub bucket: Rc<str>,
    /// When the first of them came.
    pub since: Instant,
    /// The first of them.
    pub first: M,
    /// Those who came after it: mostly nobody.
    pub others: Vec<M>,
}

impl<M> Group<M> {
    /// All of them.
    pub fn members(&self) -> impl Iterator<Item = &M> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// How many they are.
    pub fn size(&self) -> usize {
        self.others.len().saturating_add(1)
    }

    /// Keeps those who can go in one call with the first, up to the first who cannot. Returns the rest.
    pub fn split_off(&mut self, alike: impl Fn(&M, &M) -> bool) -> Option<Self> {
        let place = self.others.iter().position(|other| !alike(&self.first, other))?;
        let mut rest = self.others.drain(place..);
        let first = rest.next()?;
        Some(Self { bucket: Rc::clone(&self.bucket), since: self.since, first, others: rest.collect() })
    }
}

impl<M: PartialEq> Queues<M> {
    /// No bucket is being asked. With no patience at all everybody asks at once and for itself.
    pub fn new(patience: Duration) -> Self {
        Self { patience, buckets: HashMap::new(), queued: 0, asking: 0 }
    }

    /// How many wait, in queues and for the answers to calls.
    pub const fn under_way(&self) -> usize {
        self.queued.saturating_add(self.asking)
    }

    /// Somebody wants a bucket. Returns who is to ask for it now, or nobody, where the one who came waits.
    pub fn join(&mut self, now: Instant, bucket: &Rc<str>, member: M) -> Option<Group<M>> {
        let asked = match self.buckets.entry(Rc::clone(bucket)) {
            Entry::Occupied(asked) => asked.into_mut(),
            Entry::Vacant(unasked) => {
                unasked.insert(Bucket { calls: 0, latest: now, queue: Vec::new(), since: now });
                self.asking = self.asking.saturating_add(1);
                return Some(Group { bucket: Rc::clone(bucket), since: now, first: member, others: Vec::new() });
            }
        };
        if asked.queue.is_empty() {
            asked.since = now;
        }
        asked.queue.push(member);
        self.queued = self.queued.saturating_add(1);
        let waits = asked.calls > 0 && now.saturating_duration_since(asked.latest) < self.patience;
        if waits { None } else { self.hand_out(bucket) }
    }

    /// A group that was handed out has been put into so many calls.
    pub fn called(&mut self, now: Instant, bucket: &Rc<str>, calls: usize) {
        let Some(asked) = self.buckets.get_mut(bucket) else { return };
        asked.calls = asked.calls.saturating_add(calls);
        asked.latest = now;
        if asked.is_unused() {
            self.buckets.remove(bucket);
        }
    }

    /// So many of a group are decided without a call.
    pub fn decided(&mut self, members: usize) {
        self.asking = self.asking.saturating_sub(members);
    }

    /// A call for a bucket is over, which so many had made. Returns who is to ask now.
    pub fn answered(&mut self, bucket: &Rc<str>, members: usize) -> Option<Group<M>> {
        self.decided(members);
        let asked = self.buckets.get_mut(bucket)?;
        asked.calls = asked.calls.saturating_sub(1);
        if asked.is_unused() {
            self.buckets.remove(bucket);
            return None;
        }
        if asked.calls == 0 { self.hand_out(bucket) } else { None }
    }

    /// Time has passed. Returns those who have waited for long enough: they are to ask now.
    pub fn overdue(&mut self, now: Instant) -> Vec<Group<M>> {
        if self.queued == 0 {
            return Vec::new();
        }
        let waits =
            |asked: &Bucket<M>| !asked.queue.is_empty() && now.saturating_duration_since(asked.since) >= self.patience;
        let waiting = self.buckets.iter().filter(|(_, asked)| waits(asked)).map(|(bucket, _)| Rc::clone(bucket));
        waiting.collect::<Vec<_>>().iter().filter_map(|bucket| self.hand_out(bucket)).collect()
    }

    /// Somebody has no more interest. Nothing is asked for who waits in a queue; who is in a group stays in it.
    pub fn leave(&mut self, bucket: &Rc<str>, member: &M) {
        if let Some(asked) = self.buckets.get_mut(bucket)
            && let Some(place) = asked.queue.iter().position(|other| other == member)
        {
            asked.queue.remove(place);
            self.queued = self.queued.saturating_sub(1);
        }
    }

    fn hand_out(&mut self, bucket: &Rc<str>) -> Option<Group<M>> {
        let asked = self.buckets.get_mut(bucket)?;
        let (since, mut queue) = (asked.since, std::mem::take(&mut asked.queue).into_iter());
        let (first, others) = (queue.next()?, queue.collect::<Vec<_>>());
        let group = Group { bucket: Rc::clone(bucket), since, first, others };
        self.queued = self.queued.saturating_sub(group.size());
        self.asking = self.asking.saturating_add(group.size());
        Some(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(25);

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// What a group is, in words.
    fn told(group: Option<Group<u32>>) -> String {
        group.map_or_else(String::new, |group| format!("{} {:?}", group.bucket, group.members().collect::<Vec<_>>()))
    }

    struct Table {
        queues: Queues<u32>,
        now: Instant,
    }

    impl Table {
        fn new() -> Self {
            Self { queues: Queues::new(PATIENCE), now: Instant::now() }
        }

        /// Somebody comes; who asks then is in one call.
        fn join(&mut self, bucket: &str, member: u32) -> String {
            let group = self.queues.join(self.now, &bucket.into(), member);
            self.called(group)
        }

        fn answered(&mut self, bucket: &str, members: usize) -> String {
            let group = self.queues.answered(&bucket.into(), members);
            self.called(group)
        }

        fn overdue(&mut self) -> String {
            let groups = self.queues.overdue(self.now);
            groups.into_iter().map(|group| self.called(Some(group))).collect::<Vec<_>>().join(", ")
        }

        fn called(&mut self, group: Option<Group<u32>>) -> String {
            if let Some(group) = &group {
                self.queues.called(self.now, &group.bucket, 1);
            }
            told(group)
        }
    }

    #[test]
    fn who_comes_while_a_bucket_is_asked_goes_with_the_others_when_it_is_answered() {
        let mut table = Table::new();
        assert_eq!(table.join("a", 1), "a [1]");
        assert_eq!(table.join("a", 2), "");
        assert_eq!(table.join("b", 3), "b [3]", "another bucket has nothing to do with it");
        assert_eq!(table.join("a", 4), "");
        assert_eq!(table.queues.under_way(), 4);
        assert_eq!(table.answered("a", 1), "a [2, 4]");
        assert_eq!(table.queues.under_way(), 3);
        assert_eq!(table.answered("a", 2), "");
        assert_eq!(table.answered("b", 1), "");
        assert_eq!((table.queues.under_way(), table.queues.buckets.len()), (0, 0));
        assert_eq!(table.join("a", 5), "a [5]");
    }

    #[test]
    fn nobody_waits_behind_a_slow_call_nor_for_long() {
        let mut table = Table::new();
        table.join("a", 1);
        table.now += ms(20);
        assert_eq!(table.join("a", 2), "");
        assert_eq!(table.overdue(), "");
        table.now += ms(5);
        // The call is slow: whoever comes asks, and takes along who waits.
        assert_eq!(table.join("a", 3), "a [2, 3]");
        // Behind that one it is worth waiting.
        assert_eq!(table.join("a", 4), "");
        assert_eq!(table.answered("a", 1), "", "a call is still under way");
        table.now += ms(25);
        assert_eq!(table.overdue(), "a [4]");
        assert_eq!(table.overdue(), "");
        assert_eq!(table.answered("a", 2), "");
        assert_eq!(table.answered("a", 1), "");
        assert_eq!((table.queues.under_way(), table.queues.buckets.len()), (0, 0));
    }

    #[test]
    fn a_queue_is_as_old_as_its_first() {
        let mut table = Table::new();
        table.join("a", 1);
        table.now += ms(10);
        table.join("a", 2);
        table.now += ms(10);
        table.join("a", 3);
        let group = table.queues.answered(&"a".into(), 1).unwrap();
        assert_eq!(group.since, table.now - ms(10));
    }

    #[test]
    fn who_leaves_a_queue_is_not_asked_for() {
        let mut table = Table::new();
        table.join("a", 1);
        table.join("a", 2);
        table.join("a", 3);
        table.queues.leave(&"a".into(), &2);
        table.queues.leave(&"a".into(), &1);
        table.queues.leave(&"b".into(), &3);
        assert_eq!(table.queues.under_way(), 2);
        assert_eq!(table.answered("a", 1), "a [3]");
        table.join("a", 4);
        table.queues.leave(&"a".into(), &4);
        assert_eq!(table.answered("a", 1), "");
        assert_eq!((table.queues.under_way(), table.queues.buckets.len()), (0, 0));
    }

    #[test]
    fn a_group_is_split_where_the_next_is_not_like_the_first() {
        let mut group = Group { bucket: "a".into(), since: Instant::now(), first: 1, others: vec![3, 4, 6, 7] };
        let alike = |one: &u32, other: &u32| one % 2 == other % 2;
        let mut rest = group.split_off(alike).unwrap();
        assert_eq!(told(Some(group)), "a [1, 3]");
        let last = rest.split_off(alike);
        assert_eq!((told(Some(rest)), told(last)), ("a [4, 6]".into(), "a [7]".into()));
    }

    #[test]
    fn a_group_that_needs_no_call_leaves_nothing_behind() {
        let mut table = Table::new();
        let group = table.queues.join(table.now, &"a".into(), 1).unwrap();
        table.queues.decided(group.size());
        table.queues.called(table.now, &group.bucket, 0);
        assert_eq!((table.queues.under_way(), table.queues.buckets.len()), (0, 0));
    }

    #[test]
    fn without_patience_everybody_asks_for_itself() {
        let mut table = Table { queues: Queues::new(Duration::ZERO), now: Instant::now() };
        assert_eq!(table.join("a", 1), "a [1]");
        assert_eq!(table.join("a", 2), "a [2]");
        assert_eq!(table.answered("a", 1), "");
        assert_eq!(table.answered("a", 1), "");
    }
}
