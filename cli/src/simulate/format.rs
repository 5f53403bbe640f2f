//! How access logs are written: lines of text by one of Envoy's format strings, or objects in JSON; with or without what
//! others write around each line.

use std::collections::BTreeSet;

use super::entry::{Entry, Says, Unread};
use super::json::{self, Names};
use super::line::Line;
use super::meaning::operator;
use super::wrapper::unwrapped;

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

/// How a log is read.
#[derive(Debug)]
pub struct Format {
    /// The format that was given.
    given: Option<Line>,
    /// The usual ones.
    known: Vec<Line>,
    names: Names,
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
        let given = format.map(Line::new).transpose().map_err(|what| format!("--format: {what}"))?;
        let known =
            if given.is_some() { Vec::new() } else { KNOWN.into_iter().map(Line::new).collect::<Result<_, _>>()? };
        let named = |(name, text): &(String, String)| {
            let text = text.strip_prefix('%').ok_or("expected a command operator of Envoy's, such as %START_TIME%")?;
            match operator(text)? {
                (field, "") if field.says != Says::Nothing => Ok((name.clone(), field)),
                (_, "") => Err(format!("%{text} says nothing that a rule asks for")),
                (_, rest) => Err(format!("{rest:?} follows the command operator")),
            }
        };
        let named = |one: &(String, String)| named(one).map_err(|what| format!("--field {}: {what}", one.0));
        let names = Names::new(names.iter().map(named).collect::<Result<Vec<_>, _>>()?);
        Ok(Self { given, known, names, entry: Entry::default() })
    }

    /// The names that were told and that no line has had.
    pub const fn unmet(&self) -> &BTreeSet<String> {
        &self.names.unmet
    }

    /// What a line says.
    ///
    /// # Errors
    /// What is not understood of it, or that it tells of no request.
    pub fn read(&mut self, line: &str) -> Result<Entry, Unread> {
        let line = line.trim_start_matches('\u{feff}');
        // A format that was given may have what is written around a line in itself.
        if !self.is_given(line) {
            match unwrapped(line)? {
                Some(line) => self.read_bare(line.trim_end_matches(['\n', '\r']))?,
                None => self.read_bare(line)?,
            }
        }
        self.entry.complete()
    }

    fn is_given(&mut self, line: &str) -> bool {
        self.given.as_ref().is_some_and(|format| format.read(line, &mut self.entry).is_some())
    }

    fn read_bare(&mut self, line: &str) -> Result<(), String> {
        if self.is_given(line) {
            return Ok(());
        }
        if line.trim_start().starts_with('{') {
            return json::read(line, &mut self.names, &mut self.entry);
        }
        let place = self.known.iter().position(|format| format.read(line, &mut self.entry).is_some());
        let place = place.ok_or("it is neither JSON nor of the format of the log")?;
        // The next line is most likely of the same.
        self.known.swap(0, place);
        Ok(())
    }
}
