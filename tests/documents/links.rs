//! What the documents point to is there: files, headings, paths in backticks.

use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

use super::markdown::{apart, blocks, documents, spans};
use super::project::{project, read};

/// The targets of links outside code.
fn links(text: &str) -> Vec<String> {
    let (prose, _) = apart(text);
    // Backticks inside a link's text are allowed, so only what lies between them is blanked.
    let mut links = Vec::new();
    for (place, piece) in prose.split('`').enumerate() {
        if place % 2 == 0 {
            let targets = piece.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            links.extend(targets.map(|(target, _)| target.to_owned()));
        }
    }
    links
}

/// The anchors of the headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let (prose, _) = apart(text);
    let mut seen: HashMap<String, usize> = HashMap::new();
    let headings = prose.lines().filter_map(|line| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len() && title.starts_with(' ')).then(|| title.trim())
    });
    headings
        .map(|title| {
            let kept = title.to_lowercase();
            let kept = kept.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
            let anchor = kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect::<String>();
            let count = seen.entry(anchor.clone()).or_default();
            *count += 1;
            if *count == 1 { anchor } else { format!("{anchor}-{}", *count - 1) }
        })
        .collect()
}

/// A path as seen from the folder of a document, without `..`.
fn beside(document: &str, target: &str) -> PathBuf {
    let mut path = PathBuf::new();
    for component in Path::new(document).parent().unwrap().join(target).components() {
        match component {
            Component::ParentDir => assert!(path.pop(), "{document}: {target} leads out of the project"),
            other => path.push(other),
        }
    }
    path
}

/// What is wrong with a link of a document, if anything.
fn broken(document: &str, link: &str) -> Option<String> {
    if link.starts_with("https://") {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let path = if file.is_empty() { PathBuf::from(document) } else { beside(document, file) };
    if !project().join(&path).exists() {
        return Some(format!("{document}: there is no {}", path.display()));
    }
    let found = anchor.is_empty() || anchors(&read(&path)).contains(anchor);
    (!found).then(|| format!("{document}: {} has no heading for #{anchor}", path.display()))
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut seen = 0;
    let mut wrong = Vec::new();
    for document in documents() {
        for link in links(&read(&document)) {
            seen += 1;
            wrong.extend(broken(&document, &link));
        }
    }
    assert_eq!(wrong, [""; 0]);
    assert!(seen > 40, "{seen}");
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let cases = [
        ("recipes.md", true),
        ("../SECURITY.md#memory-of-redis", true),
        ("operations.md#a-failover", true),
        ("#sizing", true),
        ("https://example.com/", true),
        ("recipe.md", false),
        ("../SECURITY.md#memory", false),
        ("#size", false),
        ("http://example.com/", false),
    ];
    for (link, fine) in cases {
        assert_eq!(broken("docs/operations.md", link).is_none(), fine, "{link}");
    }
    let text = "# A `b`: c & d\n## Twice\n## Twice\n```\n# none\n```\n## Redis's (TLS)\n";
    let expected = ["a-b-c--d", "rediss-tls", "twice", "twice-1"];
    assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), expected);
    let text = "[a](b.md), `[no](link)`, [`c`](d.md#e)\n\n```\n[x](y)\n```\n";
    assert_eq!(links(text), ["b.md", "d.md#e"]);
}

/// A word in backticks that names a file or a folder of the project, as a path inside it.
fn path(document: &str, word: &str) -> Option<PathBuf> {
    const FOLDERS: [&str; 9] = ["src/", "lua/", "envoy/", "docs/", "tests/", "demo/", "tools/", "bench/", ".ci/"];
    // Patterns and placeholders are none, and `file::function` is looked at by another test.
    if word.contains([' ', '*', '{', '<', '…']) || word.contains("::") {
        return None;
    }
    match word {
        _ if word.starts_with("../") || word.starts_with("./") => Some(beside(document, word)),
        _ if FOLDERS.iter().any(|folder| word.starts_with(folder)) => Some(PathBuf::from(word)),
        // A document at the top, or one beside this.
        _ if word.ends_with(".md") && !word.contains('/') => {
            Some(if project().join(word).exists() { PathBuf::from(word) } else { beside(document, word) })
        }
        _ => None,
    }
}

#[test]
fn every_path_that_a_document_names_exists() {
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for document in documents() {
        let words = spans(&read(&document));
        let paths = words.iter().filter_map(|word| path(&document, word)).collect::<Vec<_>>();
        seen += paths.len();
        let missing = paths.iter().filter(|path| !project().join(path).exists());
        wrong.extend(missing.map(|path| format!("{document}: there is no {}", path.display())));
    }
    assert_eq!(wrong, [""; 0]);
    assert!(seen > 150, "{seen}");
}

#[test]
fn every_page_is_in_the_list_of_the_readme() {
    let linked = links(&read("README.md"));
    for document in documents().iter().filter(|document| document.starts_with("docs/")) {
        assert!(linked.contains(document), "README.md does not link {document}");
    }
}

#[test]
fn what_is_written_in_json_or_yaml_can_be_read() {
    let mut seen = 0;
    for document in documents() {
        for block in blocks(&read(&document)) {
            let read = match block.language.as_str() {
                "json" => {
                    serde_json::from_str::<serde_json::Value>(&block.text).map(drop).map_err(|error| error.to_string())
                }
                "yaml" => serde_yaml_ng::from_str::<serde_json::Value>(&block.text)
                    .map(drop)
                    .map_err(|error| error.to_string()),
                _ => continue,
            };
            assert_eq!(read, Ok(()), "{document}:\n{}", block.text);
            seen += 1;
        }
    }
    assert!(seen > 30, "{seen}");
}
