//! The requests of access logs, in the order in which they began.
//!
//! A log is written in the order in which requests end, so some are held back until it is unlikely that an earlier one
//! comes; and each proxy has a log of its own, so several are read side by side. No more is kept than what is held back.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use indicatif::{ProgressBar, ProgressStyle};

use super::entry::Entry;
use super::format::Format;

/// So many requests are held back, where they are not too large for memory.
const HELD_BACK: usize = 1 << 15;

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
}

/// The requests of one log.
struct Log {
    name: String,
    lines: Box<dyn BufRead>,
    number: u64,
    /// The line that was read last.
    line: Vec<u8>,
    next: Option<Entry>,
}

/// The requests of all logs.
pub struct Logs {
    format: Format,
    logs: Vec<Log>,
    /// The requests that are held back, by their times and in the order in which they were read.
    held: BTreeMap<(u64, u64), Entry>,
    held_bytes: usize,
    read: u64,
    /// What was not understood so far.
    pub faults: Faults,
    progress: ProgressBar,
}

impl Logs {
    /// Opens logs, of which `-` is standard input. Those that are packed by gzip are unpacked.
    pub fn open(files: &[PathBuf], format: Format) -> Result<Self, String> {
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
        let mut logs =
            Self { format, logs, held: BTreeMap::new(), held_bytes: 0, read: 0, faults: Faults::default(), progress };
        for place in 0..logs.logs.len() {
            logs.advance(place)?;
        }
        Ok(logs)
    }

    /// The next request.
    pub fn next(&mut self) -> Result<Option<Entry>, String> {
        while self.held.len() < HELD_BACK && self.held_bytes < MOST_MEMORY {
            let next = |log: &Log| log.next.as_ref().map(|entry| entry.at_ms);
            let earliest = self.logs.iter().enumerate().filter_map(|(place, log)| Some((next(log)?, place))).min();
            let Some((_, place)) = earliest else { break };
            if let Some(entry) = self.logs.get_mut(place).and_then(|log| log.next.take()) {
                self.read += 1;
                self.held_bytes += entry.size();
                self.held.insert((entry.at_ms, self.read), entry);
            }
            self.advance(place)?;
        }
        let next = self.held.pop_first().map(|(_, entry)| entry);
        self.held_bytes -= next.as_ref().map_or(0, Entry::size);
        if next.is_none() {
            self.progress.finish_and_clear();
        }
        Ok(next)
    }

    /// Reads a log on to its next request.
    fn advance(&mut self, place: usize) -> Result<(), String> {
        let Some(log) = self.logs.get_mut(place) else { return Ok(()) };
        while log.read_line()? {
            let line = &log.line;
            if line.trim_ascii().is_empty() {
                continue;
            }
            match self.format.read(String::from_utf8_lossy(line).trim_end_matches(['\n', '\r'])) {
                Ok(entry) => {
                    log.next = Some(entry);
                    break;
                }
                Err(what) => {
                    self.faults.count += 1;
                    if self.faults.first.len() < MOST_FAULTS {
                        self.faults.first.push(format!("{}:{}: {what}", log.name, log.number));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Log {
    fn open(file: &Path, progress: &ProgressBar) -> Result<Self, String> {
        let name = file.display().to_string();
        let bytes: Box<dyn Read> = if name == "-" {
            Box::new(std::io::stdin())
        } else {
            Box::new(File::open(file).map_err(|error| format!("{name}: {error}"))?)
        };
        let mut bytes = BufReader::with_capacity(1 << 16, progress.wrap_read(bytes));
        let start = bytes.fill_buf().map_err(|error| format!("{name}: {error}"))?;
        let lines: Box<dyn BufRead> = if start.starts_with(&[0x1f, 0x8b]) {
            Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(bytes)))
        } else {
            Box::new(bytes)
        };
        Ok(Self { name, lines, number: 0, line: Vec::new(), next: None })
    }

    /// Reads the next line, if there is one. The rest of one that is too long is a line of its own.
    fn read_line(&mut self) -> Result<bool, String> {
        self.line.clear();
        self.number += 1;
        let mut lines = self.lines.as_mut().take(LONGEST_LINE);
        let length = lines.read_until(b'\n', &mut self.line);
        length.map(|length| length > 0).map_err(|error| format!("{}:{}: {error}", self.name, self.number))
    }
}
