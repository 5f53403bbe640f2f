//! How long a denial is believed: the field `deny_cache`.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::duration::duration;
use super::reader::Node;
use super::shape::{Field, Shape, Words};
use crate::deny_cache::Settings;

/// The field.
pub const SHAPE: Shape = Shape::fields(&[
    Field::new(
        "entries",
        Shape::Integer(0, 1_000_000),
        "10000",
        "denials that a worker remembers; beyond that it forgets those asked for least lately; 0 turns it off",
    ),
    Field::new(
        "max_age",
        Shape::Text(Words::matching("a duration from 1ms to 1min, such as \"1s\"", r"^\s*[0-9].*[A-Za-z]\s*$")),
        "\"1s\"",
        "a bucket that was reset is asked again after so long at the latest",
    ),
]);

/// Reads the field.
pub fn read(node: Node<'_>) -> Option<Settings> {
    const AGES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60);
    let default = Settings::default();
    let object = node.object()?;
    let entries = object.or("entries", default.entries, |node| node.integer());
    let max_age = object
        .or("max_age", default.max_age, |node| node.parsed(|text| duration(text).filter(|age| AGES.contains(age))));
    Some(Settings { entries: entries?, max_age: max_age? })
}
