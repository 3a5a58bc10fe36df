//! Checks that the targets of links exist.

use super::pages::Page;
use std::path::{Component, Path, PathBuf};

/// Returns the links without a target. Links to other hosts are skipped: a test has no network.
pub fn wrong(root: &Path, pages: &[Page]) -> Vec<String> {
    let links = pages.iter().flat_map(|page| {
        let links = page.links.iter();
        links.map(move |link| (page, link))
    });
    let here = links.filter(|(_, link)| !link.contains("://"));
    here.filter(|(page, link)| !leads_somewhere(root, pages, page, link))
        .map(|(page, link)| format!("{}: {link}", page.path))
        .collect()
}

fn leads_somewhere(root: &Path, pages: &[Page], page: &Page, link: &str) -> bool {
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let folder = Path::new(&page.path).parent().unwrap_or(Path::new(""));
    let path = match file {
        "" => PathBuf::from(&page.path),
        _ => plain(&folder.join(file)),
    };
    // The book contains only the folder `docs`; `docs/commands.md` is generated with the book.
    let is_of_book = page.path.starts_with("docs/");
    if is_of_book && !path.starts_with("docs") {
        return false;
    }
    if path == Path::new("docs/commands.md") {
        return true;
    }
    let found = pages.iter().find(|page| Path::new(&page.path) == path);
    match (anchor, found) {
        ("", _) => root.join(&path).exists(),
        (_, Some(page)) => page.anchors.iter().any(|one| one == anchor),
        (_, None) => false,
    }
}

/// Resolves `.` and `..` without reading the file system.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

#[test]
fn what_leads_nowhere_is_found() {
    let page = |path: &str, links: &[&str]| Page {
        path: path.to_owned(),
        links: links.iter().map(|&link| link.to_owned()).collect(),
        anchors: vec!["one".to_owned()],
        blocks: Vec::new(),
    };
    let links = ["security.md", "#one", "#two", "gone.md", "../README.md"];
    let pages = [
        page("docs/README.md", &links),
        page("docs/security.md", &[]),
    ];
    assert_eq!(
        wrong(super::root(), &pages),
        ["#two", "gone.md", "../README.md"].map(|link| format!("docs/README.md: {link}"))
    );
}
