//! Checks that the glossary has the terms that are Fathom's own.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Terms of our own. If a page uses one, the glossary must have it.
const OWN: &[&str] = &[
    "appliance",
    "archive",
    "base image",
    "boot profile",
    "collector",
    "control round",
    "experiment",
    "frozen disk",
    "handover",
    "in-flight region",
    "keeper",
    "knee",
    "live map",
    "main measure",
    "manifest",
    "persistent disk",
    "post-copy",
    "predecessor",
    "run directory",
    "saved state",
    "scratch file",
    "side view",
    "slow request",
    "starter",
    "static disk",
    "stripe",
    "successor",
    "superseded image",
    "supervisor",
    "takeover",
    "tenant",
    "throttle group",
    "transient disk",
    "trial",
    "verdict",
    "worker",
];

/// Terms that a page defines for its readers although QEMU, Linux or the language has them, too.
const COMMON: &[&str] = &[
    "bitmap",
    "commit",
    "error message",
    "example",
    "failure",
    "figure",
    "frame",
    "native histogram",
    "negative slice",
    "range of zeroes",
    "ratio",
    "script there",
    "single run",
    "size",
    "snapshot",
    "target that",
    "time",
    "unknown key",
];

/// A line of the glossary.
struct Entry {
    /// The terms in lower case.
    terms: Vec<String>,
    /// The page that explains them, relative to the root of the repository.
    page: String,
}

/// The text of a page, a paragraph or a cell of a table for each item.
struct Text {
    path: String,
    /// Without code.
    prose: Vec<String>,
    /// With the code within lines.
    whole: Vec<String>,
}

impl Text {
    fn read(root: &Path, path: &str) -> Text {
        let text = fs::read_to_string(root.join(path)).expect("the page exists");
        let (mut prose, mut whole) = (vec![String::new()], vec![String::new()]);
        let mut is_block = false;
        for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::CodeBlock(_)) => is_block = true,
                Event::End(TagEnd::CodeBlock) => is_block = false,
                Event::Text(text) if !is_block => {
                    prose.last_mut().unwrap().push_str(&text);
                    whole.last_mut().unwrap().push_str(&text);
                }
                Event::Code(text) => {
                    prose.last_mut().unwrap().push('`');
                    whole.last_mut().unwrap().push_str(&text);
                }
                Event::SoftBreak | Event::HardBreak => {
                    prose.last_mut().unwrap().push(' ');
                    whole.last_mut().unwrap().push(' ');
                }
                Event::End(
                    TagEnd::Paragraph | TagEnd::Heading(_) | TagEnd::Item | TagEnd::TableCell,
                ) => {
                    prose.push(String::new());
                    whole.push(String::new());
                }
                _ => {}
            }
        }
        Text {
            path: path.to_owned(),
            prose,
            whole,
        }
    }

    /// Returns the terms that sentences of the form "A term is a ..." define.
    fn defined(&self) -> BTreeSet<String> {
        let sentences = self.prose.iter().flat_map(|text| text.split(". "));
        sentences.filter_map(defined).collect()
    }
}

/// Returns the term that a sentence of the form "A term is a ..." defines. A term has at most three
/// words.
fn defined(sentence: &str) -> Option<String> {
    let rest = sentence.trim().strip_prefix('A')?;
    let rest = rest.strip_prefix('n').unwrap_or(rest).strip_prefix(' ')?;
    let (term, rest) = rest.split_once(" is ")?;
    let is_definition = ["a ", "an ", "the ", "one "]
        .iter()
        .any(|begin| rest.starts_with(begin));
    let is_word = |c: char| c.is_ascii_lowercase() || c == '-' || c == ' ';
    let is_term = term.chars().all(is_word) && term.split(' ').count() <= 3;
    (is_definition && is_term).then(|| term.to_owned())
}

/// Returns whether a text has this term, in the singular or the plural.
fn has(text: &str, term: &str) -> bool {
    let text = text.to_lowercase();
    let plural = match term.strip_suffix("is") {
        Some(stem) => format!("{stem}es"),
        None => format!("{term}s"),
    };
    let is_word = |c: char| c.is_alphanumeric() || c == '-';
    [term, &plural].iter().any(|form| {
        text.match_indices(form).any(|(at, found)| {
            let before = text[..at].chars().next_back();
            let after = text[at + found.len()..].chars().next();
            !before.is_some_and(is_word) && !after.is_some_and(is_word)
        })
    })
}

/// Reads the glossary: the term, its meaning and its page in each line of each table.
fn entries(root: &Path) -> Vec<Entry> {
    let text = fs::read_to_string(root.join("docs/glossary.md")).expect("the glossary exists");
    let (mut entries, mut cell, mut term) = (Vec::new(), 0, String::new());
    for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::TableRow) => (cell, term) = (0, String::new()),
            Event::End(TagEnd::TableCell) => cell += 1,
            Event::Text(text) | Event::Code(text) if cell == 0 => term.push_str(&text),
            Event::Start(Tag::Link { dest_url, .. }) if cell == 2 => entries.push(Entry {
                terms: term.split(", ").map(str::to_lowercase).collect(),
                page: plain(&Path::new("docs").join(&*dest_url)),
            }),
            _ => {}
        }
    }
    entries
}

/// Resolves `..` without reading the file system.
fn plain(path: &Path) -> String {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain.display().to_string()
}

/// Returns the pages on which terms of our own must be those of the glossary.
fn texts(root: &Path) -> Vec<Text> {
    let pages = super::pages::all(root);
    let pages = pages.iter().map(|page| page.path.as_str());
    // The glossary itself, and the words of other people.
    let pages = pages.filter(|path| !["docs/glossary.md", "docs/sources.md"].contains(path));
    pages.map(|path| Text::read(root, path)).collect()
}

#[test]
fn page_of_each_term_uses_it() {
    let root = super::root();
    let texts = texts(root);
    let mut wrong = Vec::new();
    for Entry { terms, page } in entries(root) {
        let text = texts.iter().find(|text| text.path == page);
        for term in terms {
            if !text.is_some_and(|text| text.whole.iter().any(|part| has(part, &term))) {
                wrong.push(format!("{term}: not on {page}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn terms_of_our_own_are_in_the_glossary() {
    let root = super::root();
    let entries = entries(root);
    assert!(entries.len() > 40, "the glossary's tables have changed");
    let known: BTreeSet<&str> = entries
        .iter()
        .flat_map(|entry| entry.terms.iter().map(String::as_str))
        .collect();
    let (mut missing, mut unused) = (Vec::new(), COMMON.to_vec());
    for text in texts(root) {
        let used = OWN
            .iter()
            .filter(|term| text.prose.iter().any(|part| has(part, term)));
        let defined = text.defined();
        let (common, own): (Vec<&str>, Vec<&str>) = defined
            .iter()
            .map(String::as_str)
            .partition(|term| COMMON.contains(term));
        unused.retain(|term| !common.contains(term));
        let all: BTreeSet<&str> = used.copied().chain(own).collect();
        for term in all.difference(&known) {
            missing.push(format!("{}: {term}", text.path));
        }
    }
    assert!(missing.is_empty(), "add to docs/glossary.md: {missing:#?}");
    assert!(unused.is_empty(), "no page defines: {unused:#?}");
}

#[test]
fn definitions_and_words_are_found() {
    let some = |term: &str| Some(term.to_owned());
    assert_eq!(defined("A cell is one point in one round"), some("cell"));
    assert_eq!(defined("An axis is a parameter"), some("axis"));
    assert_eq!(defined("A disk is open"), None);
    assert_eq!(defined("A server of Fathom is a process"), None);
    assert_eq!(defined("All is a word"), None);
    assert!(has("Tenants start", "tenant") && has("two axes", "axis"));
    assert!(!has("tenancy", "tenant") && !has("base-image", "base"));
}
