//! The documents of the project, and their parts: prose, words in backticks, blocks of code.
//!
//! Of Markdown this knows what the documents use. It does not know what the parts mean.

use std::fs;

use super::project::{files, project};

/// A block of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// What stands behind its first fence; empty mostly.
    pub language: String,
    /// Its text, without the indentation of the fence.
    pub text: String,
    /// The last line above it that is not blank.
    pub above: String,
}

/// All documents for readers: those at the top, those in `docs/`, and each README below `envoy/`.
pub fn documents() -> Vec<String> {
    let mut found = files("envoy");
    found.retain(|file| file.ends_with("/README.md"));
    for folder in ["", "docs"] {
        let entries = fs::read_dir(project().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let pages = entries.filter(|path| path.extension().is_some_and(|ending| ending == "md"));
        found.extend(pages.map(|path| path.strip_prefix(project()).unwrap().to_string_lossy().into_owned()));
    }
    found.sort();
    found
}

/// The text outside blocks of code, with those lines blank, and the blocks.
pub fn apart(text: &str) -> (String, Vec<Block>) {
    let (mut prose, mut blocks) = (String::new(), Vec::new());
    let mut open: Option<(usize, Block)> = None;
    let mut above = String::new();
    for line in text.lines() {
        let bare = line.trim_start();
        match (&mut open, bare.strip_prefix("```")) {
            (None, Some(language)) => {
                let block = Block { language: language.trim().to_owned(), text: String::new(), above: above.clone() };
                open = Some((line.len() - bare.len(), block));
            }
            (Some(_), Some("")) => blocks.extend(open.take().map(|(_, block)| block)),
            (Some((indentation, block)), _) => {
                block.text.push_str(line.get(*indentation..).unwrap_or_default());
                block.text.push('\n');
            }
            (None, None) => {
                if !bare.is_empty() {
                    above = bare.trim_end().to_owned();
                }
                prose.push_str(line);
            }
        }
        prose.push('\n');
    }
    assert!(open.is_none(), "a block of code does not end");
    (prose, blocks)
}

/// The blocks of code.
pub fn blocks(text: &str) -> Vec<Block> {
    apart(text).1
}

/// The texts of the blocks of code in a language.
pub fn blocks_of(language: &str, text: &str) -> Vec<String> {
    blocks(text).into_iter().filter(|block| block.language == language).map(|block| block.text).collect()
}

/// The words in backticks outside blocks of code.
pub fn spans(text: &str) -> Vec<String> {
    let (prose, _) = apart(text);
    // A line end inside is a blank. A table escapes its separator.
    prose
        .split("\n\n")
        .flat_map(|paragraph| {
            let joined = paragraph.replace('\n', " ").replace("\\|", "|");
            let spans = joined.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
            spans.into_iter()
        })
        .collect()
}
