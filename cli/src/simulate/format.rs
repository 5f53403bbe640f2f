//! How access logs are written: lines of text by one of Envoy's format strings, or objects in JSON.
//!
//! A format string has literal text and command operators, such as `%START_TIME%`. An operator that says nothing that a rule
//! could ask for is passed over.

use std::collections::HashMap;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::entry::{Entry, Field, Says};

/// The formats of text that are tried where none is given: Envoy's own, and Istio's.
const KNOWN: [&str; 2] = [
    "[%START_TIME%] \"%REQUEST_HEADER(:METHOD)% %REQUEST_HEADER(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%\" %RESPONSE_CODE% \
     %RESPONSE_FLAGS% %BYTES_RECEIVED% %BYTES_SENT% %DURATION% %RESPONSE_HEADER(X-ENVOY-UPSTREAM-SERVICE-TIME)% \
     \"%REQUEST_HEADER(X-FORWARDED-FOR)%\" \"%REQUEST_HEADER(USER-AGENT)%\" \"%REQUEST_HEADER(X-REQUEST-ID)%\" \
     \"%REQUEST_HEADER(:AUTHORITY)%\" \"%UPSTREAM_HOST%\"",
    "[%START_TIME%] \"%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%\" %RESPONSE_CODE% %RESPONSE_FLAGS% \
     %RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% \"%UPSTREAM_TRANSPORT_FAILURE_REASON%\" %BYTES_RECEIVED% \
     %BYTES_SENT% %DURATION% %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% \"%REQ(X-FORWARDED-FOR)%\" \"%REQ(USER-AGENT)%\" \
     \"%REQ(X-REQUEST-ID)%\" \"%REQ(:AUTHORITY)%\" \"%UPSTREAM_HOST%\" %UPSTREAM_CLUSTER_RAW% %UPSTREAM_LOCAL_ADDRESS% \
     %DOWNSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_REMOTE_ADDRESS% %REQUESTED_SERVER_NAME% %ROUTE_NAME%",
];

/// The most names of a log in JSON that are told apart.
const MOST_NAMES: usize = 10_000;

impl Field {
    /// What a command operator says, without its percent signs: its name, and its arguments in parentheses.
    fn of_operator(name: &str, arguments: &str) -> Self {
        let property = |path: &str| Says::Property(path.into());
        Self::named(match name {
            "START_TIME" => Says::Time,
            "REQ" | "REQUEST_HEADER" => {
                // `A?B` is B where there is no A. What a rule sees is the path before it was rewritten.
                let name = match arguments.split_once('?') {
                    Some((_, second)) if second.starts_with(':') => second,
                    Some((first, _)) => first,
                    None => arguments,
                };
                Says::Header(name.to_ascii_lowercase().into())
            }
            "DOWNSTREAM_REMOTE_ADDRESS" | "DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT" => property("source.address"),
            "DOWNSTREAM_LOCAL_ADDRESS" => property("destination.address"),
            "DOWNSTREAM_PEER_URI_SAN" => property("connection.uri_san_peer_certificate"),
            "DOWNSTREAM_PEER_SUBJECT" => property("connection.subject_peer_certificate"),
            "REQUESTED_SERVER_NAME" => property("connection.requested_server_name"),
            "PROTOCOL" => property("request.protocol"),
            "ROUTE_NAME" => property("xds.route_name"),
            "UPSTREAM_CLUSTER" | "UPSTREAM_CLUSTER_RAW" => property("xds.cluster_name"),
            _ => Says::Nothing,
        })
    }

    /// What is meant by a name in a log in JSON. Names are free there; these are the usual ones, and any other is taken for
    /// that of a header.
    fn of_name(name: &str) -> Self {
        let name = name.to_ascii_lowercase().replace('_', "-");
        let header = |name: &str, rank| Self::guessed(Says::Header(name.into()), rank);
        let property = |path: &str, rank| Self::guessed(Says::Property(path.into()), rank);
        // A log may have several names of one thing, as its own time beside that at which a collector found it. What a rule
        // sees is the path before it was rewritten.
        match name.as_str() {
            "start-time" => Self::guessed(Says::Time, 1),
            "timestamp" => Self::guessed(Says::Time, 2),
            "@timestamp" | "time" => Self::guessed(Says::Time, 3),
            "method" => header(":method", 1),
            "request-method" => header(":method", 2),
            "x-envoy-origin-path" | "x-envoy-original-path" => header(":path", 1),
            "path" => header(":path", 2),
            "request-path" => header(":path", 3),
            "authority" => header(":authority", 1),
            "request-authority" => header(":authority", 2),
            "host" => header(":authority", 3),
            "request-id" => header("x-request-id", 2),
            "downstream-remote-address" => property("source.address", 1),
            "client-ip" => property("source.address", 2),
            "remote-address" => property("source.address", 3),
            "downstream-peer-uri-san" => property("connection.uri_san_peer_certificate", 1),
            "requested-server-name" => property("connection.requested_server_name", 1),
            "route-name" => property("xds.route_name", 1),
            "upstream-cluster" => property("xds.cluster_name", 1),
            "protocol" => property("request.protocol", 1),
            other => header(other, 1),
        }
    }
}

/// Reads an operator at the start of a text after its first percent sign. What follows its last one is returned with it.
fn operator(text: &str) -> Option<(Field, &str)> {
    let end = text.find(|byte: char| !(byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == '_'))?;
    let (name, rest) = text.split_at_checked(end).filter(|(name, _)| !name.is_empty())?;
    let (arguments, rest) = match rest.strip_prefix('(') {
        Some(rest) => rest.split_once(')')?,
        None => ("", rest),
    };
    // A length at which the value is cut.
    let rest = match rest.strip_prefix(':') {
        Some(rest) => rest.trim_start_matches(|byte: char| byte.is_ascii_digit()),
        None => rest,
    };
    Some((Field::of_operator(name, arguments), rest.strip_prefix('%')?))
}

/// A format string, taken apart.
#[derive(Debug)]
struct Line {
    start: String,
    /// Each field with the text that follows it.
    fields: Vec<(Field, String)>,
}

impl Line {
    fn new(format: &str) -> Result<Self, String> {
        let (mut start, mut fields) = (String::new(), Vec::<(Field, String)>::new());
        // Where it was copied out of JSON or YAML, what is written there with a backslash is what it stands for.
        let format = format.replace("\\n", "\n").replace("\\\"", "\"");
        let mut rest = format.trim_end_matches(['\n', '\r']);
        let mut literal = |fields: &mut Vec<(Field, String)>, text: &str| match fields.last_mut() {
            Some((_, after)) => after.push_str(text),
            None => start.push_str(text),
        };
        while let Some((before, after)) = rest.split_once('%') {
            literal(&mut fields, before);
            if let Some(after) = after.strip_prefix('%') {
                literal(&mut fields, "%");
                rest = after;
                continue;
            }
            let (field, after) =
                operator(after).ok_or_else(|| format!("no command operator of Envoy begins at %{after}"))?;
            if fields.last().is_some_and(|(_, between)| between.is_empty()) {
                return Err(format!("nothing parts two operators before %{after}"));
            }
            fields.push((field, String::new()));
            rest = after;
        }
        literal(&mut fields, rest);
        if !fields.iter().any(|(field, _)| field.says == Says::Time) {
            return Err("it has no %START_TIME%, without which nothing can be told".to_owned());
        }
        Ok(Self { start, fields })
    }

    /// Reads what a line says. `None` where it is not of this format.
    fn read(&self, line: &str, entry: &mut Entry) -> Option<()> {
        let mut rest = line.strip_prefix(self.start.as_str())?;
        entry.clear();
        for (field, after) in &self.fields {
            let end = if after.is_empty() { rest.len() } else { rest.find(after.as_str())? };
            let value = rest.get(..end)?;
            // What stands between blanks has none itself.
            if after.starts_with(' ') && value.contains(' ') {
                return None;
            }
            entry.add(field, value);
            rest = rest.get(end + after.len()..)?;
        }
        rest.is_empty().then_some(())
    }
}

/// How a log is read.
#[derive(Debug)]
pub struct Format {
    lines: Vec<Line>,
    names: HashMap<String, Field>,
    /// What the line that is read says so far.
    entry: Entry,
}

impl Format {
    /// Text by that format string of Envoy's, or else by one of the usual ones; and JSON, whose names mean what is usual
    /// unless they are among these, each with a command operator.
    ///
    /// # Errors
    /// What is wrong with the format string or an operator.
    pub fn new(format: Option<&str>, names: &[(String, String)]) -> Result<Self, String> {
        let lines = match format {
            Some(format) => vec![Line::new(format).map_err(|what| format!("--format: {what}"))?],
            None => KNOWN.into_iter().map(Line::new).collect::<Result<_, _>>()?,
        };
        let named = |(name, text): &(String, String)| match text.strip_prefix('%').and_then(operator) {
            Some((field, "")) if field.says != Says::Nothing => Ok((name.clone(), field)),
            Some((_, "")) => Err(format!("--field {name}: {text} says nothing that a rule asks for")),
            _ => Err(format!("--field {name}: expected a command operator of Envoy's, such as %START_TIME%")),
        };
        let names = names.iter().map(named).collect::<Result<_, _>>()?;
        Ok(Self { lines, names, entry: Entry::default() })
    }

    /// What a line says.
    ///
    /// # Errors
    /// What is not understood of it.
    pub fn read(&mut self, line: &str) -> Result<Entry, String> {
        if line.trim_start().starts_with('{') {
            self.entry.clear();
            let object = Object { names: &mut self.names, entry: &mut self.entry };
            let mut json = serde_json::Deserializer::from_str(line);
            object.deserialize(&mut json).map_err(|error| format!("no JSON: {error}"))?;
        } else {
            let place = self.lines.iter().position(|format| format.read(line, &mut self.entry).is_some());
            let place = place.ok_or("it is neither JSON nor of the format of the log")?;
            // The next line is most likely of the same.
            self.lines.swap(0, place);
        }
        self.entry.complete()
    }
}

/// An object of JSON, read into an entry. What is in objects within it counts as if it were in it.
struct Object<'a> {
    names: &'a mut HashMap<String, Field>,
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
struct Name<'a>(&'a mut HashMap<String, Field>);

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
        if let Some(field) = self.0.get(name) {
            return Ok(field.clone());
        }
        let field = Field::of_name(name);
        if self.0.len() < MOST_NAMES {
            self.0.insert(name.to_owned(), field.clone());
        }
        Ok(field)
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

    fn visit_map<M: MapAccess<'de>>(self, fields: M) -> Result<(), M::Error> {
        self.object.visit_map(fields)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut elements: S) -> Result<(), S::Error> {
        while elements.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}
