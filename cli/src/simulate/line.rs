//! Lines of text, by one of Envoy's format strings.
//!
//! A format string has literal text and command operators, such as `%START_TIME%`. An operator that says nothing that a rule
//! could ask for is passed over.

use super::entry::{Entry, Field, Says};
use super::meaning::operator;

/// A format string, taken apart.
#[derive(Debug)]
pub struct Line {
    start: String,
    fields: Vec<Place>,
}

/// Where a field is.
#[derive(Debug)]
struct Place {
    field: Field,
    /// The text that follows it.
    after: String,
    /// How often that text is in the field itself, as a blank may be in a time.
    within: usize,
}

impl Line {
    /// A format string as it is, or as it is escaped in JSON or YAML.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(format: &str) -> Result<Self, String> {
        let (mut start, mut fields) = (String::new(), Vec::<Place>::new());
        let format = unescaped(format);
        let mut rest = format.trim_end_matches(['\n', '\r']);
        let mut literal = |fields: &mut Vec<Place>, text: &str| match fields.last_mut() {
            Some(place) => place.after.push_str(text),
            None => start.push_str(text),
        };
        while let Some((before, after)) = rest.split_once('%') {
            literal(&mut fields, before);
            if let Some(after) = after.strip_prefix('%') {
                literal(&mut fields, "%");
                rest = after;
                continue;
            }
            let (field, behind) = operator(after)?;
            if fields.last().is_some_and(|place| place.after.is_empty()) {
                return Err(format!("nothing parts two operators before %{behind}"));
            }
            fields.push(Place { field, after: String::new(), within: 0 });
            rest = behind;
        }
        literal(&mut fields, rest);
        let mut times = 0;
        for place in &mut fields {
            if let Says::Time(form) = &place.field.says {
                place.within = form.has(&place.after);
                times += 1;
            }
        }
        if times == 0 {
            return Err("it has no %START_TIME%, without which nothing can be told".to_owned());
        }
        Ok(Self { start, fields })
    }

    /// Reads what a line says. `None` where it is not of this format.
    pub fn read(&self, line: &str, entry: &mut Entry) -> Option<()> {
        let mut rest = line.strip_prefix(self.start.as_str())?;
        entry.clear();
        for Place { field, after, within } in &self.fields {
            let end = if after.is_empty() { rest.len() } else { rest.match_indices(after.as_str()).nth(*within)?.0 };
            let value = rest.get(..end)?;
            // What stands between blanks has none itself.
            if after.starts_with(' ') && *within == 0 && value.contains(' ') {
                return None;
            }
            entry.add(field, value);
            rest = rest.get(end + after.len()..)?;
        }
        rest.is_empty().then_some(())
    }
}

/// A text without the escapes of JSON and YAML. A backslash before anything else is one.
fn unescaped(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        result.push_str(before);
        let known = [('n', '\n'), ('r', '\r'), ('t', '\t'), ('"', '"'), ('/', '/'), ('\\', '\\')];
        let meant = known.into_iter().find_map(|(escape, meant)| Some((meant, after.strip_prefix(escape)?)));
        let (meant, behind) = meant.unwrap_or(('\\', after));
        result.push(meant);
        rest = behind;
    }
    result + rest
}
