//! Reads a JSON document field by field and keeps going at a fault, so that all of them are reported at once.
//!
//! serde's derived readers stop at the first fault, know their path only with help, and take the last of two fields of
//! one name without a word. Here a fault is noted with its path, and reading goes on with what can still be read. What is
//! expected where stands in the [shapes](super::shape); each value is read by its own.
//!
//! Invariant: where a method returns `None` for a value that is there, it has noted a fault.

use std::cell::RefCell;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::shape::{self, Shape};

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

/// What there is to say of one place of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// Where: `rules[0].limits[1].refill`. Empty for the document as a whole.
    pub path: String,
    /// What was found there and what is expected.
    pub what: String,
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() { f.write_str(&self.what) } else { write!(f, "{}: {}", self.path, self.what) }
    }
}

/// What was found so far, in the order in which it was.
#[derive(Debug, Default)]
pub struct Remarks {
    faults: RefCell<Vec<Remark>>,
    warnings: RefCell<Vec<Remark>>,
}

impl Remarks {
    /// The faults, for which the document is refused, and the warnings, for which it is not.
    pub fn into_faults_and_warnings(self) -> (Vec<Remark>, Vec<Remark>) {
        (self.faults.into_inner(), self.warnings.into_inner())
    }
}

fn note(remarks: &RefCell<Vec<Remark>>, path: &str, what: String) {
    if let Ok(mut remarks) = remarks.try_borrow_mut() {
        remarks.push(Remark { path: path.to_owned(), what });
    }
}

/// A value at its place in the document.
#[derive(Clone, Debug)]
pub struct Node<'a> {
    value: &'a Value,
    path: String,
    shape: &'static Shape,
    remarks: &'a Remarks,
}

/// An object whose fields are all known and there once.
#[derive(Debug)]
pub struct Object<'a> {
    node: Node<'a>,
    fields: &'static [shape::Field],
}

impl<'a> Node<'a> {
    /// The whole document.
    pub const fn root(value: &'a Value, shape: &'static Shape, remarks: &'a Remarks) -> Self {
        Self { value, path: String::new(), shape, remarks }
    }

    /// Notes a fault of this value: what was found is added.
    pub fn expected(&self, what: &str) {
        self.fault(format!("found {}, expected {what}", self.found()));
    }

    /// Notes that this value is not what its shape says.
    pub fn misfit(&self) {
        self.expected(&self.shape.expected());
    }

    /// Notes a fault in words of its own.
    pub fn fault(&self, what: String) {
        note(&self.remarks.faults, &self.path, what);
    }

    /// Notes what is legal, and surely not meant.
    pub fn warn(&self, what: String) {
        note(&self.remarks.warnings, &self.path, what);
    }

    /// Where the value is.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A value below this one.
    fn below(&self, value: &'a Value, path: String, shape: &'static Shape) -> Self {
        Self { value, path, shape, remarks: self.remarks }
    }

    /// The value as an object of its shape's fields and no others, with all of those that have to be there.
    pub fn object(self) -> Option<Object<'a>> {
        let Value::Object(values) = self.value else {
            // Where an object belongs, a text may be a URL with a password in it.
            match self.value {
                Value::Text(_) => self.fault("found a text, expected an object".to_owned()),
                _ => self.expected("an object"),
            }
            return None;
        };
        let shape = self.shape.object()?;
        let mut all_known = true;
        for (place, (name, _)) in values.iter().enumerate() {
            let earlier = values.iter().take(place).any(|(other, _)| other == name);
            if !shape.fields.iter().any(|field| field.name == name) {
                self.fault(unknown_field(name, shape.fields));
                all_known = false;
            } else if earlier {
                self.fault(there_twice(name));
            }
        }
        let is_there = |name: &&str| values.iter().any(|(other, _)| other == name);
        for field in shape.fields.iter().filter(|field| field.required && !is_there(&field.name)) {
            let what = format!("missing, expected {}", field.shape.expected());
            note(&self.remarks.faults, &path_of(&self.path, field.name), what);
        }
        for among in shape.among {
            let count = among.names.iter().filter(|name| is_there(name)).count();
            // A field that is unknown may be meant to be the one that is missed.
            if (count < among.count.0 && all_known) || count > among.count.1 {
                self.fault(among.otherwise.to_owned());
            }
        }
        Some(Object { fields: shape.fields, node: self })
    }

    /// The elements of a list, and none of anything else. Notes no fault.
    pub fn elements(&self) -> Vec<Self> {
        let (Value::List(elements), Some(shape)) = (self.value, self.shape.list()) else { return Vec::new() };
        let element = |(place, value)| self.below(value, format!("{}[{place}]", self.path), shape.element);
        elements.iter().enumerate().map(element).collect()
    }

    /// A field of an object, where it is one and has it. Notes no fault.
    pub fn field(&self, name: &str) -> Option<Self> {
        let field = self.shape.object().and_then(|shape| shape.fields.iter().find(|field| field.name == name));
        debug_assert!(field.is_some(), "{} has no field {name}", self.path);
        let Value::Object(values) = self.value else { return None };
        let (_, value) = values.iter().find(|(field, _)| field == name)?;
        Some(self.below(value, path_of(&self.path, name), &field?.shape))
    }

    /// The value as a list of as many elements as its shape says.
    pub fn list(&self) -> Option<Vec<Self>> {
        let (Value::List(elements), Some(shape)) = (self.value, self.shape.list()) else {
            self.misfit();
            return None;
        };
        if elements.len() < shape.count.0 || elements.len() > shape.count.1 {
            self.expected(shape.otherwise);
        }
        Some(self.elements())
    }

    /// The elements of a list, each read by a function; each is read in any case, for its faults.
    pub fn list_of<T>(&self, read: impl FnMut(Self) -> Option<T>) -> Option<Vec<T>> {
        all(self.list()?.into_iter().map(read))
    }

    /// The fields of an object whose names are not known before, and which have to differ.
    pub fn entries(&self) -> Option<Vec<(&'a str, Self)>> {
        let (Value::Object(values), Shape::Map(_, shape)) = (self.value, self.shape) else {
            self.misfit();
            return None;
        };
        for (place, (name, _)) in values.iter().enumerate() {
            if values.iter().take(place).any(|(other, _)| other.eq_ignore_ascii_case(name)) {
                self.fault(there_twice(name));
            }
        }
        let entry = |(name, value): &'a (String, Value)| {
            (name.as_str(), self.below(value, path_of(&self.path, &printable(name)), shape))
        };
        Some(values.iter().map(entry).collect())
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
                self.misfit();
                None
            }
        }
    }

    /// The value as text.
    pub fn text(&self) -> Option<&'a str> {
        match self.value {
            Value::Text(text) => Some(text),
            _ => {
                self.misfit();
                None
            }
        }
    }

    /// The value as text of a kind: read by a function that returns `None` where it is not of that kind.
    pub fn parsed<T>(&self, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        let parsed = self.text().map(parse)?;
        if parsed.is_none() {
            self.misfit();
        }
        parsed
    }

    /// The value as an integer in the range of its shape. One that is written as a float (`100.0`, `1e+15`) counts:
    /// control planes carry every number as one.
    pub fn integer<T: TryFrom<u64>>(&self) -> Option<T> {
        // Up to 2^53 a float counts integers one by one.
        const EXACT: f64 = 9_007_199_254_740_992.0;
        let integer = match self.value {
            Value::Integer(integer) => Some(*integer),
            Value::Float(float) if float.fract() == 0.0 && float.abs() <= EXACT => Some(*float as i128),
            _ => None,
        };
        let shape = self.shape.alternatives().iter().find(|shape| matches!(shape, Shape::Integer(..)))?;
        let Shape::Integer(least, most) = shape else { return None };
        let integer = integer.and_then(|integer| u64::try_from(integer).ok());
        let within =
            integer.filter(|integer| (least..=most).contains(&integer)).and_then(|integer| T::try_from(integer).ok());
        if within.is_none() {
            self.expected(&shape.expected());
        }
        within
    }

    /// What was found, in words.
    fn found(&self) -> String {
        if matches!(self.shape, Shape::Secret(_)) {
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
    /// A field, where it is there. One that has to be was missed already.
    pub fn get(&self, name: &str) -> Option<Node<'a>> {
        self.node.field(name)
    }

    /// What a field says, or what holds where it is not there.
    pub fn or<T>(&self, name: &str, default: T, read: impl FnOnce(Node<'a>) -> Option<T>) -> Option<T> {
        self.get(name).map_or(Some(default), read)
    }

    /// What a field says, where it is there: the outer `None` is a fault, the inner one no field.
    pub fn given<T>(&self, name: &str, read: impl FnOnce(Node<'a>) -> Option<T>) -> Option<Option<T>> {
        self.get(name).map_or(Some(None), |node| read(node).map(Some))
    }

    /// The fields that are there, in the order of the shape.
    pub fn present(&self) -> impl Iterator<Item = (&'static str, Node<'a>)> {
        self.fields.iter().filter_map(|field| Some((field.name, self.get(field.name)?)))
    }

    /// Notes a fault of the object.
    pub fn fault(&self, what: String) {
        self.node.fault(what);
    }
}

/// All of them, or `None` where one is missing; each is looked at in any case, for its faults.
pub fn all<T>(values: impl Iterator<Item = Option<T>>) -> Option<Vec<T>> {
    let (mut all, mut whole) = (Vec::new(), true);
    for value in values {
        match value {
            Some(value) => all.push(value),
            None => whole = false,
        }
    }
    whole.then_some(all)
}

fn there_twice(name: &str) -> String {
    format!("the field \"{}\" is there twice", printable(name))
}

fn path_of(parent: &str, name: &str) -> String {
    if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") }
}

fn unknown_field(name: &str, known: &[shape::Field]) -> String {
    let near = known
        .iter()
        .map(|known| (strsim::damerau_levenshtein(&name.to_ascii_lowercase(), known.name), known.name))
        .min()
        .filter(|(distance, known)| *distance <= known.len().div_ceil(3));
    let name = printable(name);
    match near {
        Some((_, near)) => format!("unknown field \"{name}\", did you mean \"{near}\"?"),
        None => {
            let known = known.iter().map(|field| field.name).collect::<Vec<_>>();
            format!("unknown field \"{name}\", expected one of {}", known.join(", "))
        }
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
