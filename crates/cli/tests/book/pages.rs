//! Parses the pages of the documentation.

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};
use std::fs;
use std::path::Path;

const INDENTED: &str = "sh elsewhere";

pub struct Page {
    /// Path relative to the root of the repository.
    pub path: String,
    /// Targets of links and pictures.
    pub links: Vec<String>,
    /// Anchors on this page that links can lead to.
    pub anchors: Vec<String>,
    pub blocks: Vec<Block>,
}

/// A block of code: a script, or a file.
pub struct Block {
    pub line: usize,
    /// How to run the block, if it is a script.
    words: Vec<String>,
    /// Name of the file, if the block is one.
    pub file: Option<String>,
    pub text: String,
}

impl Block {
    /// Returns whether the block is marked with this word.
    pub fn is(&self, how: &str) -> bool {
        self.words.iter().any(|word| word == how)
    }

    /// Parses a block's info string. Returns `None` for a block that is only to be read.
    fn begun(info: &str, line: usize) -> Option<Block> {
        let mut words = info.split_whitespace().map(str::to_owned);
        let is_script = words.next()? == "sh";
        let words: Vec<_> = words.collect();
        let file = (!is_script).then(|| words.first().cloned());
        if matches!(file, Some(None)) {
            return None;
        }
        Some(Block {
            line,
            words,
            file: file.flatten(),
            text: String::new(),
        })
    }
}

/// Returns the README and the pages of the book.
pub fn all(root: &Path) -> Vec<Page> {
    let mut paths = vec!["README.md".to_owned()];
    for folder in ["docs", "docs/img"] {
        let files = fs::read_dir(root.join(folder)).unwrap();
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let pages = files.filter(|name| name.ends_with(".md"));
        paths.extend(pages.map(|name| format!("{folder}/{name}")));
    }
    paths.sort();
    paths.iter().map(|path| Page::read(root, path)).collect()
}

impl Page {
    pub fn read(root: &Path, path: &str) -> Page {
        let text = fs::read_to_string(root.join(path)).unwrap();
        let mut page = Page {
            path: path.to_owned(),
            links: Vec::new(),
            anchors: Vec::new(),
            blocks: Vec::new(),
        };
        let parser = Parser::new_ext(&text, Options::ENABLE_TABLES);
        let line = |at: usize| text[..at].lines().count() + 1;
        let (mut heading, mut block) = (None::<String>, None::<Block>);
        for (event, range) in parser.into_offset_iter() {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(dest_url.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let heading = heading.take().unwrap_or_default();
                    page.anchors.push(anchor(&heading));
                }
                Event::Start(Tag::CodeBlock(kind)) => {
                    // Indented blocks are only to be read.
                    let info = match &kind {
                        CodeBlockKind::Fenced(info) => info,
                        CodeBlockKind::Indented => INDENTED,
                    };
                    block = Block::begun(info, line(range.start));
                }
                Event::End(TagEnd::CodeBlock) => page.blocks.extend(block.take()),
                Event::Text(text) | Event::Code(text) => {
                    let to = block.as_mut().map(|block| &mut block.text);
                    if let Some(to) = to.or(heading.as_mut()) {
                        to.push_str(&text);
                    }
                }
                // A comment that prepares the next block; readers need not see it.
                Event::Start(Tag::HtmlBlock) => {
                    let comment = text[range.clone()].trim_end().strip_suffix("-->");
                    let comment = comment.and_then(|comment| comment.strip_prefix("<!-- "));
                    if let Some((info, text)) = comment.and_then(|all| all.split_once('\n'))
                        && let Some(block) = Block::begun(info, line(range.start))
                    {
                        let text = text.to_owned();
                        page.blocks.push(Block { text, ..block });
                    }
                }
                _ => {}
            }
        }
        page
    }
}

/// Returns the anchor of a heading, as the programs that render the pages derive it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|one| match one {
        ' ' => Some('-'),
        one if one.is_alphanumeric() || one == '-' || one == '_' => Some(one.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}
