//! Times as logs write them.

use std::rc::Rc;

use jiff::Timestamp;
use jiff::fmt::strtime::BrokenDownTime;
use jiff::tz::Offset;

/// A time to try a form with, in seconds since 1970: an afternoon.
const EXAMPLE: u64 = 1_794_578_461;

/// How a time is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// RFC 3339, or a number since 1970.
    Usual,
    /// By a format of strftime.
    Format(Rc<str>),
}

impl Form {
    /// The form that the arguments of Envoy's `START_TIME` describe. Envoy writes UTC.
    ///
    /// # Errors
    /// That such times cannot be read.
    pub fn new(format: &str) -> Result<Self, String> {
        // Numbers are what they are without a format.
        let fractions = (1..=9).map(|digits| format!("%{digits}f"));
        let rest =
            fractions.fold(format.replace("%s", "").replace("%f", ""), |rest, fraction| rest.replace(&fraction, ""));
        if rest.is_empty() || rest == "." {
            return Ok(Self::Usual);
        }
        // What Envoy adds to strftime, and what it calls otherwise.
        let mut known = format.replace("%E*S", "%S%.f").replace("%Ez", "%:z").replace("%ET", "T");
        for digits in 1..=9 {
            known = known.replace(&format!("%E{digits}S"), "%S%.f").replace(&format!("%{digits}f"), "%f");
        }
        let form = Self::Format(known.into());
        // A format that leaves out the hour or the year gives another time back.
        if form.example().and_then(|example| form.read(&example)) != Some(EXAMPLE * 1000) {
            return Err(format!(
                "times cannot be read as START_TIME({format}) writes them; let it say the date and the time of day to the second"
            ));
        }
        Ok(form)
    }

    /// A time that is written so.
    fn example(&self) -> Option<String> {
        let time = Timestamp::from_second(i64::try_from(EXAMPLE).ok()?).ok()?;
        match self {
            Self::Usual => Some(time.to_string()),
            Self::Format(format) => {
                let mut told = BrokenDownTime::from(Offset::UTC.to_datetime(time));
                told.set_offset(Some(Offset::UTC));
                told.to_string(format.as_bytes()).ok()
            }
        }
    }

    /// How often that text is in a time that is written so.
    pub fn has(&self, text: &str) -> usize {
        if text.is_empty() { 0 } else { self.example().map_or(0, |example| example.matches(text).count()) }
    }

    /// Milliseconds since 1970.
    pub fn read(&self, text: &str) -> Option<u64> {
        let time = match self {
            Self::Usual if text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => return number(text),
            Self::Usual => text.parse::<Timestamp>().ok()?,
            Self::Format(format) => {
                let told = BrokenDownTime::parse(format.as_bytes(), text).ok()?;
                let utc = || Offset::UTC.to_timestamp(told.to_datetime().ok()?).ok();
                told.to_timestamp().ok().or_else(utc)?
            }
        };
        u64::try_from(time.as_millisecond()).ok()
    }
}

/// A number since 1970: of seconds, or of a part of them.
fn number(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let whole = whole.parse::<u64>().ok()?;
    // A number of 12 digits and more is one of milliseconds since 1973, and so on: as seconds it were the year 5138.
    match whole {
        0..100_000_000_000 => {
            let digits = format!("{fraction:0<3}");
            whole.checked_mul(1000)?.checked_add(digits.get(..3)?.parse().ok()?)
        }
        100_000_000_000..100_000_000_000_000 => Some(whole),
        100_000_000_000_000..100_000_000_000_000_000 => Some(whole / 1000),
        _ => Some(whole / 1_000_000),
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
            assert_eq!(Form::Usual.read(text), expected, "{text}");
        }
    }

    #[test]
    fn a_time_is_read_by_the_format_that_wrote_it() {
        let cases = [
            ("", "2016-04-15T20:17:00.310Z", Some(1_460_751_420_310)),
            ("%s", "1460751420", Some(1_460_751_420_000)),
            ("%s%3f", "1460751420310", Some(1_460_751_420_310)),
            ("%s.%6f", "1460751420.310999", Some(1_460_751_420_310)),
            ("%Y-%m-%d %H:%M:%S", "2016-04-15 20:17:00", Some(1_460_751_420_000)),
            ("%Y/%m/%dT%H:%M:%S%z", "2016/04/15T22:17:00+0200", Some(1_460_751_420_000)),
            ("%d/%b/%Y:%H:%M:%S %z", "15/Apr/2016:20:17:00 +0000", Some(1_460_751_420_000)),
            ("%Y-%m-%dT%H:%M:%S.%3f%z", "2016-04-15T20:17:00.310+0000", Some(1_460_751_420_310)),
            ("%F %T.%9f", "2016-04-15 20:17:00.310999999", Some(1_460_751_420_310)),
            ("%F %H:%M:%E3S", "2016-04-15 20:17:00.310", Some(1_460_751_420_310)),
            ("%F %T", "15/Apr/2016", None),
        ];
        for (format, text, expected) in cases {
            assert_eq!(Form::new(format).ok().and_then(|form| form.read(text)), expected, "{format} {text}");
        }
        for format in ["%H:%M:%S", "%B", "%Q", "%", "%F", "%F %I:%M:%S", "%F %H:%M", "%m-%d %T"] {
            assert!(Form::new(format).unwrap_err().starts_with("times cannot be read as START_TIME("), "{format}");
        }
    }
}
