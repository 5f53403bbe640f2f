//! A request as an access log tells of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use meshquota::request::Facts;

use super::time::Form;

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
    /// When it began, and how that is written.
    Time(Form),
    /// A header by its name in lower case.
    Header(Rc<str>),
    /// A property of the proxy by its path, joined by dots.
    Property(Rc<str>),
    /// The address of the connection's other end, which is the client's where no proxy stands before this one.
    Peer,
    /// Nothing that a rule asks for.
    Nothing,
}

/// So many characters of a log are quoted in faults.
const LONGEST_QUOTE: usize = 80;

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
    ///
    /// # Errors
    /// That it does not.
    pub fn complete(&self) -> Result<Self, Unread> {
        let (field, told) =
            self.find(|says| matches!(says, Says::Time(_))).ok_or_else(|| "it has no time".to_owned())?;
        let Says::Time(form) = &field.says else { return Err("it has no time".to_owned().into()) };
        let at_ms = form.read(told).ok_or_else(|| {
            let expected = match form {
                Form::Usual => "RFC 3339, or a number since 1970",
                Form::Format(format) => format,
            };
            format!("the time {:?} is not understood; expected {expected}", shortened(told))
        })?;
        if self.header(":path").is_none() && self.header(":method").is_none() {
            return Err(Unread::NoRequest);
        }
        Ok(Self { at_ms, ..self.clone() })
    }

    /// The bytes that it takes in memory.
    pub fn size(&self) -> usize {
        size_of::<Self>() + self.values.capacity() + self.fields.capacity() * size_of::<(Field, Range<usize>)>()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.find(|says| matches!(says, Says::Header(other) if **other == *name)).map(|(_, value)| value)
    }

    /// The address that Envoy took for the client's. A log that does not have it may have x-forwarded-for, to whose end an
    /// Envoy at the edge adds it.
    fn property(&self, path: &str) -> Option<&str> {
        let told = self.find(|says| matches!(says, Says::Property(other) if **other == *path)).map(|(_, value)| value);
        let forwarded = || self.header("x-forwarded-for")?.rsplit(',').next().map(str::trim);
        let peer = || self.find(|says| *says == Says::Peer).map(|(_, value)| value);
        if path == "source.address" { told.or_else(forwarded).or_else(peer) } else { told }
    }

    fn find(&self, is_it: impl Fn(&Says) -> bool) -> Option<(&Field, &str)> {
        let those = self.fields.iter().filter(|(field, _)| is_it(&field.says));
        let (field, range) = those.min_by_key(|(field, _)| field.rank)?;
        Some((field, self.values.get(range.clone())?))
    }
}

/// Why a line is no request.
#[derive(Debug, PartialEq, Eq)]
pub enum Unread {
    /// It is whole and tells of none, as that of a TCP connection.
    NoRequest,
    /// What is not understood of it.
    Fault(String),
}

impl From<String> for Unread {
    fn from(what: String) -> Self {
        Self::Fault(what)
    }
}

/// The start of a text, to be quoted.
fn shortened(text: &str) -> String {
    let mut start = text.chars().take(LONGEST_QUOTE).collect::<String>();
    if start.len() < text.len() {
        start.push('…');
    }
    start
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
    fn the_last_address_of_x_forwarded_for_stands_in_for_one_that_is_not_logged() {
        let mut entry = Entry::default();
        entry.add(&Field::named(Says::Header("x-forwarded-for".into())), "198.51.100.1, 192.0.2.7");
        entry.add(&Field::named(Says::Peer), "192.0.2.9:4711");
        assert_eq!(entry.property("source.address"), Some("192.0.2.7"));
        assert_eq!(entry.property("xds.route_name"), None);
        entry.add(&Field::named(Says::Property("source.address".into())), "192.0.2.8:4711");
        assert_eq!(entry.property("source.address"), Some("192.0.2.8:4711"));
    }
}
