//! A request as an access log tells of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use jiff::Timestamp;
use meshquota::request::Facts;

/// A field of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// What it says.
    pub says: Says,
    /// Of several that say the same one of the lowest rank counts, and of these the first.
    rank: u8,
}

impl Field {
    /// One that was named for what it says, by a format or by whoever asks.
    pub const fn named(says: Says) -> Self {
        Self::guessed(says, 0)
    }

    /// One that most likely says that, unless there is one of a lower rank.
    pub const fn guessed(says: Says, rank: u8) -> Self {
        Self { says, rank }
    }
}

/// What a field of a log says of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Says {
    /// When it began.
    Time,
    /// A header by its name in lower case.
    Header(Rc<str>),
    /// A property of the proxy by its path, joined by dots.
    Property(Rc<str>),
    /// Nothing that a rule asks for.
    Nothing,
}

/// One request of a log.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// When it began, in milliseconds since 1970. It is known once the entry is complete.
    pub at_ms: u64,
    /// All values, one after the other.
    values: String,
    fields: Vec<(Field, Range<usize>)>,
}

impl Entry {
    /// Forgets all, to be used anew.
    pub fn clear(&mut self) {
        self.values.clear();
        self.fields.clear();
    }

    /// Adds what a field says. A dash is how Envoy writes that there is nothing.
    pub fn add(&mut self, field: &Field, value: &str) {
        if field.says == Says::Nothing || value.is_empty() || value == "-" {
            return;
        }
        let start = self.values.len();
        self.values.push_str(value);
        self.fields.push((field.clone(), start..self.values.len()));
    }

    /// A copy that takes no more room than it needs, where this tells of a request: of a time, and of a path or a method.
    pub fn complete(&self) -> Result<Self, String> {
        let told = self.find(|says| *says == Says::Time).ok_or("it has no time")?;
        let at_ms = time(told).ok_or_else(|| {
            format!("the time {told:?} is not understood; expected RFC 3339, or seconds or milliseconds since 1970")
        })?;
        if self.header(":path").is_none() && self.header(":method").is_none() {
            return Err("it has neither a method nor a path".to_owned());
        }
        Ok(Self { at_ms, ..self.clone() })
    }

    /// The bytes that it takes in memory.
    pub fn size(&self) -> usize {
        size_of::<Self>() + self.values.capacity() + self.fields.capacity() * size_of::<(Field, Range<usize>)>()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.find(|says| matches!(says, Says::Header(other) if **other == *name))
    }

    /// The address that Envoy took for the client's. A log that does not have it may have x-forwarded-for, to whose end an
    /// Envoy at the edge adds it.
    fn property(&self, path: &str) -> Option<&str> {
        let told = self.find(|says| matches!(says, Says::Property(other) if **other == *path));
        let forwarded = || self.header("x-forwarded-for")?.rsplit(',').next().map(str::trim);
        if path == "source.address" { told.or_else(forwarded) } else { told }
    }

    fn find(&self, is_it: impl Fn(&Says) -> bool) -> Option<&str> {
        let those = self.fields.iter().filter(|(field, _)| is_it(&field.says));
        let (_, range) = those.min_by_key(|(field, _)| field.rank)?;
        self.values.get(range.clone())
    }
}

/// Milliseconds since 1970 of a time as logs have it.
fn time(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let whole = whole.parse::<u64>().ok()?;
        // A number of 12 digits and more is one of milliseconds since 1973, and so on: as seconds it were the year 5138.
        match whole {
            0..100_000_000_000 => {}
            100_000_000_000..100_000_000_000_000 => return Some(whole),
            100_000_000_000_000..100_000_000_000_000_000 => return Some(whole / 1000),
            _ => return Some(whole / 1_000_000),
        }
        let digits = format!("{fraction:0<3}");
        return whole.checked_mul(1000)?.checked_add(digits.get(..3)?.parse().ok()?);
    }
    let time = text.parse::<Timestamp>().ok()?;
    u64::try_from(time.as_millisecond()).ok()
}

/// What rules asked for that no entry had.
#[derive(Debug, Default)]
pub struct Missing(RefCell<BTreeMap<String, bool>>);

impl Missing {
    /// The names, in order.
    pub fn names(&self) -> Vec<String> {
        self.0.borrow().iter().filter(|(_, found)| !**found).map(|(name, _)| name.clone()).collect()
    }

    fn note<'a>(&self, name: &str, found: Option<&'a str>) -> Option<&'a str> {
        let mut names = self.0.borrow_mut();
        match names.get_mut(name) {
            Some(known) => *known = *known || found.is_some(),
            None => {
                names.insert(name.to_owned(), found.is_some());
            }
        }
        found
    }
}

/// An entry that is asked, and what it is asked for in vain.
pub struct Asked<'a> {
    /// The request.
    pub entry: &'a Entry,
    /// What is not there.
    pub missing: &'a Missing,
}

impl Facts for Asked<'_> {
    fn header(&self, name: &str) -> Option<Vec<u8>> {
        self.missing.note(name, self.entry.header(name)).map(|value| value.as_bytes().to_vec())
    }

    fn property(&self, path: &[&str]) -> Option<Vec<u8>> {
        let path = path.join(".");
        self.missing.note(&path, self.entry.property(&path)).map(|value| value.as_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_understood_as_logs_write_it() {
        let cases = [
            ("2016-04-15T20:17:00.310Z", Some(1_460_751_420_310)),
            ("2016-04-15T22:17:00.310+02:00", Some(1_460_751_420_310)),
            ("2016-04-15T20:17:00Z", Some(1_460_751_420_000)),
            ("1460751420", Some(1_460_751_420_000)),
            ("1460751420.3", Some(1_460_751_420_300)),
            ("1460751420.310999", Some(1_460_751_420_310)),
            ("1460751420310", Some(1_460_751_420_310)),
            ("1460751420310999", Some(1_460_751_420_310)),
            ("1460751420310999999", Some(1_460_751_420_310)),
            ("99999999999999999999", None),
            ("15/Apr/2016:20:17:00 +0000", None),
            ("2016-04-15 20:17", None),
            ("1.2.3", None),
            (".", None),
        ];
        for (text, expected) in cases {
            assert_eq!(time(text), expected, "{text}");
        }
    }

    #[test]
    fn the_last_address_of_x_forwarded_for_stands_in_for_one_that_is_not_logged() {
        let mut entry = Entry::default();
        entry.add(&Field::named(Says::Header("x-forwarded-for".into())), "198.51.100.1, 192.0.2.7");
        assert_eq!(entry.property("source.address"), Some("192.0.2.7"));
        assert_eq!(entry.property("xds.route_name"), None);
        entry.add(&Field::named(Says::Property("source.address".into())), "192.0.2.8:4711");
        assert_eq!(entry.property("source.address"), Some("192.0.2.8:4711"));
    }
}
