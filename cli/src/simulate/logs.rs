//! The requests of access logs, in the order in which they began.
//!
//! A log is written in the order in which requests end, so of each some are held back until it is unlikely that an earlier
//! one comes; and each proxy has a log of its own, so several are read side by side. No more is kept than what is held back.
//!
//! Invariant: a request with a time that is far ahead, as of a clock that was wrong, holds up no other: it waits among those
//! that are held back.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use indicatif::{ProgressBar, ProgressStyle};

use super::entry::{Entry, Unread};
use super::format::Format;

/// So many requests are held back of all logs together, where they are not too large for memory ...
const HELD_BACK: usize = 1 << 15;

/// ... and so many of each, where there are many logs.
const HELD_BACK_OF_EACH: usize = 1 << 10;

/// The memory that they may take, in bytes: for lines of two kilobytes, of which little can be left out.
const MOST_MEMORY: usize = 1 << 26;

/// The longest line that is read, in bytes.
const LONGEST_LINE: u64 = 1 << 20;

/// So many faults are told with their places.
const MOST_FAULTS: usize = 5;

/// What was not understood.
#[derive(Debug, Default)]
pub struct Faults {
    /// How many lines.
    pub count: u64,
    /// The first of them: the place, and what is wrong.
    pub first: Vec<String>,
    /// How many lines tell of no request, as those of TCP connections.
    pub connections: u64,
    /// The logs that could not be read to their ends: the place, and why.
    pub cut: Vec<String>,
}

/// One log.
struct Log {
    name: String,
    lines: Box<dyn BufRead>,
    number: u64,
    /// The line that was read last.
    line: Vec<u8>,
    /// Whether there is no more.
    ended: bool,
    /// The requests that are held back, by their times and in the order in which they were read, and their bytes in memory.
    held: BTreeMap<(u64, u64), Entry>,
    bytes: usize,
}

/// The requests of all logs.
pub struct Logs {
    /// How they are written.
    pub format: Format,
    logs: Vec<Log>,
    /// The earliest request that is held back of each log: its time, and the log's place.
    earliest: BTreeSet<(u64, usize)>,
    /// What was not understood so far.
    pub faults: Faults,
    progress: ProgressBar,
}

impl Logs {
    /// Opens logs, of which `-` is standard input. Those that are packed by gzip are unpacked.
    pub fn open(files: &[PathBuf], format: Format) -> Result<Self, String> {
        if let Some(twice) =
            files.iter().enumerate().find_map(|(place, file)| files.iter().take(place).find(|other| *other == file))
        {
            return Err(format!("{}: it is given twice, and would count twice", twice.display()));
        }
        let size = files.iter().map(|file| std::fs::metadata(file).map(|data| data.len()).ok()).sum::<Option<u64>>();
        let progress = match size {
            Some(size) => {
                let style = ProgressStyle::with_template("{bar:40} {percent}% of {total_bytes}, {eta} to go")
                    .unwrap_or_else(|_| ProgressStyle::default_bar());
                ProgressBar::new(size).with_style(style)
            }
            None => ProgressBar::new_spinner().with_style(
                ProgressStyle::with_template("{spinner} {bytes} read")
                    .unwrap_or_else(|_| ProgressStyle::default_spinner()),
            ),
        };
        let logs = files.iter().map(|file| Log::open(file, &progress)).collect::<Result<_, _>>()?;
        let mut logs = Self { format, logs, earliest: BTreeSet::new(), faults: Faults::default(), progress };
        for place in 0..logs.logs.len() {
            logs.fill(place);
        }
        Ok(logs)
    }

    /// The next request.
    pub fn next(&mut self) -> Option<Entry> {
        let Some((_, place)) = self.earliest.pop_first() else {
            self.progress.finish_and_clear();
            return None;
        };
        let log = self.logs.get_mut(place)?;
        let (_, entry) = log.held.pop_first()?;
        log.bytes -= entry.size();
        self.fill(place);
        Some(entry)
    }

    /// Reads a log on until enough of it is held back. It is not among those whose earliest is known.
    fn fill(&mut self, place: usize) {
        let logs = self.logs.len().max(1);
        let (most, most_bytes) = ((HELD_BACK / logs).max(HELD_BACK_OF_EACH), MOST_MEMORY / logs);
        let Some(log) = self.logs.get_mut(place) else { return };
        while log.held.is_empty() || (log.held.len() < most && log.bytes < most_bytes) {
            match log.read_line() {
                Ok(true) => {}
                Ok(false) => break,
                // What was read of it counts.
                Err(what) => {
                    self.faults.cut.push(what);
                    break;
                }
            }
            let line = String::from_utf8_lossy(&log.line);
            if line.trim_ascii().is_empty() {
                continue;
            }
            match self.format.read(line.trim_end_matches(['\n', '\r'])) {
                Ok(entry) => {
                    log.bytes += entry.size();
                    log.held.insert((entry.at_ms, log.number), entry);
                }
                Err(Unread::NoRequest) => self.faults.connections += 1,
                Err(Unread::Fault(what)) => {
                    self.faults.count += 1;
                    if self.faults.first.len() < MOST_FAULTS {
                        self.faults.first.push(format!("{}:{}: {what}", log.name, log.number));
                    }
                }
            }
        }
        self.earliest.extend(log.held.keys().next().map(|(at_ms, _)| (*at_ms, place)));
    }
}

impl Log {
    fn open(file: &Path, progress: &ProgressBar) -> Result<Self, String> {
        let name = file.display().to_string();
        let bytes: Box<dyn Read> = if name == "-" {
            Box::new(std::io::stdin())
        } else {
            Box::new(File::open(file).map_err(|error| not_opened(&name, &error))?)
        };
        let mut bytes = BufReader::with_capacity(1 << 16, progress.wrap_read(bytes));
        let start = bytes.fill_buf().map_err(|error| format!("{name}: {error}"))?;
        let lines: Box<dyn BufRead> = if start.starts_with(&[0x1f, 0x8b]) {
            Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(bytes)))
        } else {
            Box::new(bytes)
        };
        Ok(Self { name, lines, number: 0, line: Vec::new(), ended: false, held: BTreeMap::new(), bytes: 0 })
    }

    /// Reads the next line, if there is one. The rest of one that is too long is a line of its own.
    fn read_line(&mut self) -> Result<bool, String> {
        if self.ended {
            return Ok(false);
        }
        self.line.clear();
        self.number += 1;
        let read = self.lines.as_mut().take(LONGEST_LINE).read_until(b'\n', &mut self.line);
        self.ended = !read.as_ref().is_ok_and(|length| *length > 0);
        read.map(|_| !self.ended).map_err(|error| format!("{}:{}: {error}", self.name, self.number))
    }
}

/// Why a log could not be opened.
fn not_opened(name: &str, error: &std::io::Error) -> String {
    // POSIX calls it EMFILE.
    let too_many = error.raw_os_error() == Some(24);
    let remedy = if too_many { "; raise the limit with ulimit -n, or read fewer logs at once" } else { "" };
    format!("{name}: {error}{remedy}")
}
