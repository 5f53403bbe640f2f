//! Reads a JSON document field by field and keeps going at a fault, so that all of them are reported at once.
//!
//! serde's derived readers stop at the first fault, know their path only with help, and take the last of two fields of
//! one name without a word. Here a fault is noted with its path, and reading goes on with what can still be read.
//!
//! Invariant: where a method returns `None` for a value that is there, it has noted a fault.

use std::cell::RefCell;
use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value in which nothing is lost: fields keep their order, and those of one name are all there.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number that is written as an integer and fits.
    Integer(i128),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Value>),
    /// An object.
    Object(Vec<(String, Value)>),
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values;
        impl<'de> Visitor<'de> for Values {
            type Value = Value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Integer(value.into()))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(Value::Integer(value.into()))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Float(value))
            }
            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(Value::Text(value.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(element) = elements.next_element()? {
                    list.push(element);
                }
                Ok(Value::List(list))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
                let mut object = Vec::new();
                while let Some(field) = fields.next_entry()? {
                    object.push(field);
                }
                Ok(Value::Object(object))
            }
        }
        deserializer.deserialize_any(Values)
    }
}

/// One fault of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where: `rules[0].limits[1].refill`. Empty for the document as a whole.
    pub path: String,
    /// What was found there and what is expected.
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() { f.write_str(&self.what) } else { write!(f, "{}: {}", self.path, self.what) }
    }
}

/// The faults found so far.
#[derive(Debug, Default)]
pub struct Faults(RefCell<Vec<Fault>>);

impl Faults {
    /// Notes a fault.
    pub fn note(&self, path: &str, what: String) {
        if let Ok(mut faults) = self.0.try_borrow_mut() {
            faults.push(Fault { path: path.to_owned(), what });
        }
    }

    /// The faults, in the order in which they were found.
    pub fn into_vec(self) -> Vec<Fault> {
        self.0.into_inner()
    }
}

/// A value at its place in the document.
#[derive(Clone, Debug)]
pub struct Node<'a> {
    value: &'a Value,
    path: String,
    secret: bool,
    faults: &'a Faults,
}

/// An object whose fields are all known and there once.
#[derive(Debug)]
pub struct Object<'a> {
    fields: &'a [(String, Value)],
    node: Node<'a>,
}

impl<'a> Node<'a> {
    /// The whole document.
    pub const fn root(value: &'a Value, faults: &'a Faults) -> Self {
        Self { value, path: String::new(), secret: false, faults }
    }

    /// A value that no fault may repeat.
    pub fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    /// Notes a fault of this value: what was found is added.
    pub fn expected(&self, what: &str) {
        self.faults.note(&self.path, format!("found {}, expected {what}", self.found()));
    }

    /// Notes a fault in words of its own.
    pub fn fault(&self, what: String) {
        self.faults.note(&self.path, what);
    }

    /// Where the value is.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The value as an object that may have these fields and no others.
    pub fn object(self, known: &[&str]) -> Option<Object<'a>> {
        let Value::Object(fields) = self.value else {
            // Where an object belongs, a text may be a URL with a password in it.
            match self.value {
                Value::Text(_) => self.fault("found a text, expected an object".to_owned()),
                _ => self.expected("an object"),
            }
            return None;
        };
        for (place, (name, _)) in fields.iter().enumerate() {
            let earlier = fields.iter().take(place).any(|(other, _)| other == name);
            if !known.contains(&name.as_str()) {
                self.fault(unknown_field(name, known));
            } else if earlier {
                self.fault(format!("the field \"{}\" is there twice", printable(name)));
            }
        }
        Some(Object { fields, node: self })
    }

    /// The elements of a list, and none of anything else. Notes no fault.
    pub fn elements(&self) -> Vec<Node<'a>> {
        let Value::List(elements) = self.value else { return Vec::new() };
        let element = |(place, value)| Node {
            value,
            path: format!("{}[{place}]", self.path),
            secret: self.secret,
            faults: self.faults,
        };
        elements.iter().enumerate().map(element).collect()
    }

    /// A field of an object, where it is one and has it. Notes no fault.
    pub fn field(&self, name: &str) -> Option<Node<'a>> {
        let Value::Object(fields) = self.value else { return None };
        let (_, value) = fields.iter().find(|(field, _)| field == name)?;
        Some(Node { value, path: path_of(&self.path, name), secret: self.secret, faults: self.faults })
    }

    /// The value as a list.
    pub fn list(&self, of: &str) -> Option<Vec<Node<'a>>> {
        if !self.is_list() {
            self.expected(&format!("a list of {of}"));
            return None;
        }
        Some(self.elements())
    }

    /// The fields of an object whose names are not known before, which have to differ.
    pub fn fields(&self, what: &str) -> Option<Vec<(&'a str, Node<'a>)>> {
        let Value::Object(fields) = self.value else {
            self.expected(what);
            return None;
        };
        for (place, (name, _)) in fields.iter().enumerate() {
            if fields.iter().take(place).any(|(other, _)| other.eq_ignore_ascii_case(name)) {
                self.fault(format!("the field \"{}\" is there twice", printable(name)));
            }
        }
        Some(fields.iter().filter_map(|(name, _)| Some((name.as_str(), self.field(name)?))).collect())
    }

    /// Whether the value is a list.
    pub const fn is_list(&self) -> bool {
        matches!(self.value, Value::List(_))
    }

    /// Whether the value is an object.
    pub const fn is_object(&self) -> bool {
        matches!(self.value, Value::Object(_))
    }

    /// The value as a truth.
    pub fn boolean(&self) -> Option<bool> {
        match self.value {
            Value::Bool(value) => Some(*value),
            _ => {
                self.expected("true or false");
                None
            }
        }
    }

    /// The value as text; `what` says what it should have been.
    pub fn text(&self, what: &str) -> Option<&'a str> {
        match self.value {
            Value::Text(text) => Some(text),
            _ => {
                self.expected(what);
                None
            }
        }
    }

    /// The value as text of a kind: read by a function that returns `None` where it is not of that kind.
    pub fn parsed<T>(&self, what: &str, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        let parsed = self.text(what).map(parse)?;
        if parsed.is_none() {
            self.expected(what);
        }
        parsed
    }

    /// The value as an integer in a range. One that is written as a float (`100.0`, `1e+15`) counts: control planes
    /// carry every number as one.
    pub fn integer(&self, range: RangeInclusive<u64>) -> Option<u64> {
        // Up to 2^53 a float counts integers one by one.
        const EXACT: f64 = 9_007_199_254_740_992.0;
        let integer = match self.value {
            Value::Integer(integer) => Some(*integer),
            Value::Float(float) if float.fract() == 0.0 && float.abs() <= EXACT => Some(*float as i128),
            _ => None,
        };
        let within = integer.and_then(|integer| u64::try_from(integer).ok()).filter(|integer| range.contains(integer));
        if within.is_none() {
            self.expected(&format!("an integer from {} to {}", range.start(), range.end()));
        }
        within
    }

    /// What was found, in words.
    fn found(&self) -> String {
        if self.secret {
            return "something else".to_owned();
        }
        match self.value {
            Value::Null => "null".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Integer(value) => value.to_string(),
            // Writing floats would be a twentieth of the module.
            Value::Float(value) if value.fract() != 0.0 => "a fraction".to_owned(),
            Value::Float(value) if value.abs() < 1e30 => (*value as i128).to_string(),
            Value::Float(_) => "a number of more than 30 digits".to_owned(),
            Value::Text(text) if text.is_empty() => "an empty text".to_owned(),
            Value::Text(text) => format!("\"{}\"", printable(text)),
            Value::List(list) => format!("a list of {}", list.len()),
            Value::Object(_) => "an object".to_owned(),
        }
    }
}

impl<'a> Object<'a> {
    /// A field, where it is there.
    pub fn get(&self, name: &str) -> Option<Node<'a>> {
        self.node.field(name)
    }

    /// A field that has to be there; `what` says what it should be.
    pub fn require(&self, name: &str, what: &str) -> Option<Node<'a>> {
        let field = self.get(name);
        if field.is_none() {
            self.node.faults.note(&path_of(&self.node.path, name), format!("missing, expected {what}"));
        }
        field
    }

    /// Whether it has no field at all.
    pub const fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Notes a fault of the object.
    pub fn fault(&self, what: String) {
        self.node.fault(what);
    }
}

fn path_of(parent: &str, name: &str) -> String {
    if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") }
}

fn unknown_field(name: &str, known: &[&str]) -> String {
    let near = known
        .iter()
        .map(|known| (strsim::damerau_levenshtein(&name.to_ascii_lowercase(), known), known))
        .min()
        .filter(|(distance, known)| *distance <= known.len().div_ceil(3));
    let name = printable(name);
    match near {
        Some((_, near)) => format!("unknown field \"{name}\", did you mean \"{near}\"?"),
        None => format!("unknown field \"{name}\", expected one of {}", known.join(", ")),
    }
}

/// A text fit for a log line.
fn printable(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut shown: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        shown.push('…');
    }
    shown
}
