//! Lines of JSON. Their names are free; what each says is known by now, or told by whoever asks.

use std::collections::{BTreeSet, HashMap};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::entry::{Entry, Field, Says};

/// The most names that are remembered.
const MOST_NAMES: usize = 10_000;

/// The longest name that may be one of a header, in bytes.
const LONGEST_NAME: usize = 256;

/// What is known of the names of fields.
#[derive(Debug)]
pub struct Names {
    known: HashMap<String, Field>,
    /// Those that were told and that no line has had so far.
    pub unmet: BTreeSet<String>,
}

impl Names {
    /// These are told, and count more than the usual ones.
    pub fn new(told: impl IntoIterator<Item = (String, Field)>) -> Self {
        let known = told.into_iter().collect::<HashMap<_, _>>();
        let unmet = known.keys().cloned().collect();
        Self { known, unmet }
    }

    fn field(&mut self, name: &str) -> Field {
        if let Some(field) = self.known.get(name) {
            if !self.unmet.is_empty() {
                self.unmet.remove(name);
            }
            return field.clone();
        }
        if name.len() > LONGEST_NAME {
            return Field::named(Says::Nothing);
        }
        let field = Field::of_name(name);
        if self.known.len() < MOST_NAMES {
            self.known.insert(name.to_owned(), field.clone());
        }
        field
    }
}

/// Reads what a line says.
///
/// # Errors
/// That it is not one object of JSON.
pub fn read(line: &str, names: &mut Names, entry: &mut Entry) -> Result<(), String> {
    entry.clear();
    let mut json = serde_json::Deserializer::from_str(line);
    let object = Object { names, entry };
    object.deserialize(&mut json).and_then(|()| json.end()).map_err(|error| format!("no JSON: {error}"))
}

/// An object of JSON, read into an entry. What is in objects within it counts as if it were in it.
struct Object<'a> {
    names: &'a mut Names,
    entry: &'a mut Entry,
}

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut fields: M) -> Result<(), M::Error> {
        while let Some(field) = fields.next_key_seed(Name(self.names))? {
            fields.next_value_seed(Scalar { field, object: Object { names: self.names, entry: self.entry } })?;
        }
        Ok(())
    }
}

/// The name of a field.
struct Name<'a>(&'a mut Names);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = Field;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Field, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Field;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Field, E> {
        Ok(self.0.field(name))
    }
}

/// The value of a field.
struct Scalar<'a> {
    field: Field,
    object: Object<'a>,
}

impl Scalar<'_> {
    fn add<E>(self, value: &str) -> Result<(), E> {
        self.object.entry.add(&self.field, value);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Scalar<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Scalar<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        self.add(value)
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.add(&value.to_string())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.add(&value.to_string())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.add(&value.to_string())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.add(if value { "true" } else { "false" })
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<M: MapAccess<'de>>(self, mut fields: M) -> Result<(), M::Error> {
        // The headers of an answer are not those of its request.
        if self.field.says == Says::Nothing {
            while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        }
        self.object.visit_map(fields)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut elements: S) -> Result<(), S::Error> {
        while elements.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}
