//! Tests the documentation: links have targets, commands do what the pages say, and the book
//! contains all of its pages.

mod glossary;
mod links;
mod pages;
mod prose;
mod run;

use pages::Page;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{iter, thread};

/// Returns the root of the repository.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

#[test]
fn links_lead_somewhere() {
    let pages = pages::all(root());
    let wrong = links::wrong(root(), &pages);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_contents_have_each_page_once() {
    let contents = Page::read(root(), "docs/SUMMARY.md");
    let mut listed = BTreeMap::<String, usize>::new();
    for link in &contents.links {
        *listed.entry(format!("docs/{link}")).or_default() += 1;
    }
    // The only page that is generated with the book.
    assert_eq!(listed.remove("docs/commands.md"), Some(1));
    let pages = pages::all(root());
    let there = pages.iter().map(|page| page.path.as_str());
    let there = there.filter(|path| path.starts_with("docs/") && *path != contents.path);
    let there: BTreeMap<_, _> = there.map(|path| (path.to_owned(), 1)).collect();
    assert_eq!(listed, there);
}

#[test]
fn what_a_page_shows_can_be_done() {
    let pages = &pages::all(root());
    let next = &AtomicUsize::new(0);
    // The pages' commands wait more than they compute, so several pages run at a time.
    let some = || {
        let next = || pages.get(next.fetch_add(1, Ordering::Relaxed));
        iter::from_fn(next).filter_map(run::all_of).collect()
    };
    let wrong: Vec<Vec<String>> = thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(some));
        let ended = threads.into_iter().map(|thread| thread.join().unwrap());
        ended.collect()
    });
    let wrong = wrong.concat();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
