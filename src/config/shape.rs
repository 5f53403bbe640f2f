//! What a configuration may look like, as data: the fields of each object, their types, ranges, defaults and meanings.
//!
//! Each room of the configuration says so once, for its own fields. The [reader](super::reader) refuses by it what does
//! not fit, in words that stand here; the JSON Schema and the tables of the documentation are written from it. What the
//! proxy has no use for (meanings, defaults in words, patterns) is not compiled into the module.

/// What a value may be.
#[derive(Debug)]
pub enum Shape {
    /// `true` or `false`.
    Flag,
    /// An integer from the first to the second.
    Integer(u64, u64),
    /// A text of a kind.
    Text(Words),
    /// A text that is never shown.
    Secret(Words),
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A list.
    List(List),
    /// An object of known fields.
    Object(Object),
    /// An object whose names are not known before, and whose values are all of one shape.
    Map(Words, &'static Self),
    /// One of two that are of different JSON types.
    Either(Words, &'static [Self; 2]),
}

/// What a value is, in words that follow "expected".
#[derive(Debug)]
pub struct Words {
    /// The words.
    pub expected: &'static str,
    /// A regular expression of ECMA-262 that every right text matches, and as few others as it can tell. For editors.
    #[cfg(not(target_arch = "wasm32"))]
    pub pattern: Option<&'static str>,
}

/// A list.
#[derive(Debug)]
pub struct List {
    /// What is in it, in words that follow "a list of".
    pub of: &'static str,
    /// An element.
    pub element: &'static Shape,
    /// How many there are at least and at most.
    pub count: (usize, usize),
    /// What is expected where there are fewer or more.
    pub otherwise: &'static str,
}

/// An object of known fields.
#[derive(Debug)]
pub struct Object {
    /// Its fields, in the order in which they are documented.
    pub fields: &'static [Field],
    /// Which of them go together.
    pub among: &'static [Among],
}

/// How many of some fields there may be.
#[derive(Debug)]
pub struct Among {
    /// The fields.
    pub names: &'static [&'static str],
    /// How many of them there are at least and at most.
    pub count: (usize, usize),
    /// What is said where there are fewer or more.
    pub otherwise: &'static str,
}

/// A field of an object.
#[derive(Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// What its value may be.
    pub shape: Shape,
    /// Whether it has to be there.
    pub required: bool,
    /// What holds where it is not there: a JSON value, or words in place of one.
    #[cfg(not(target_arch = "wasm32"))]
    pub default: &'static str,
    /// What it means.
    #[cfg(not(target_arch = "wasm32"))]
    pub meaning: &'static str,
}

impl Words {
    /// Words for a value of which no pattern is known.
    pub const fn new(expected: &'static str) -> Self {
        Self {
            expected,
            #[cfg(not(target_arch = "wasm32"))]
            pattern: None,
        }
    }

    /// Words for texts of a pattern.
    #[cfg_attr(target_arch = "wasm32", allow(unused_variables))]
    pub const fn matching(expected: &'static str, pattern: &'static str) -> Self {
        Self {
            expected,
            #[cfg(not(target_arch = "wasm32"))]
            pattern: Some(pattern),
        }
    }
}

#[cfg_attr(target_arch = "wasm32", allow(unused_variables))]
impl Field {
    /// A field that has to be there.
    pub const fn required(name: &'static str, shape: Shape, meaning: &'static str) -> Self {
        Self {
            name,
            shape,
            required: true,
            #[cfg(not(target_arch = "wasm32"))]
            default: "",
            #[cfg(not(target_arch = "wasm32"))]
            meaning,
        }
    }

    /// A field that may be left out.
    pub const fn new(name: &'static str, shape: Shape, default: &'static str, meaning: &'static str) -> Self {
        Self {
            name,
            shape,
            required: false,
            #[cfg(not(target_arch = "wasm32"))]
            default,
            #[cfg(not(target_arch = "wasm32"))]
            meaning,
        }
    }
}

impl Shape {
    /// An object of these fields, any of which may be there together.
    pub const fn fields(fields: &'static [Field]) -> Self {
        Self::Object(Object { fields, among: &[] })
    }

    /// A text of this kind.
    pub const fn text(expected: &'static str) -> Self {
        Self::Text(Words::new(expected))
    }

    /// Its alternatives; itself where there is only one.
    pub const fn alternatives(&self) -> &[Self] {
        match self {
            Self::Either(_, alternatives) => alternatives.as_slice(),
            _ => std::slice::from_ref(self),
        }
    }

    /// The shape as an object of known fields, where it can be one.
    pub fn object(&self) -> Option<&Object> {
        self.alternatives().iter().find_map(|shape| if let Self::Object(object) = shape { Some(object) } else { None })
    }

    /// The shape as a list, where it can be one.
    pub fn list(&self) -> Option<&List> {
        self.alternatives().iter().find_map(|shape| if let Self::List(list) = shape { Some(list) } else { None })
    }

    /// What is expected, in words.
    pub fn expected(&self) -> String {
        match self {
            Self::Flag => "true or false".to_owned(),
            Self::Integer(least, most) => format!("an integer from {least} to {most}"),
            Self::Text(words) | Self::Secret(words) | Self::Map(words, _) | Self::Either(words, _) => {
                words.expected.to_owned()
            }
            Self::Choice(names) => alternatives_of(names),
            Self::List(list) => format!("a list of {}", list.of),
            Self::Object(_) => "an object".to_owned(),
        }
    }
}

/// `"a", "b" or "c"`
fn alternatives_of(names: &[&str]) -> String {
    let mut text = String::new();
    for (place, name) in names.iter().enumerate() {
        let between = match names.len().saturating_sub(place) {
            _ if place == 0 => "",
            1 => " or ",
            _ => ", ",
        };
        text.push_str(between);
        text.push('"');
        text.push_str(name);
        text.push('"');
    }
    text
}
