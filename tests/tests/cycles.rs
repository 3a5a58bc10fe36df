//! Checks that the files of the listed crates do not depend on each other in circles.
//!
//! Files in a circle cannot be read one after the other. A file depends on another one if it uses a
//! name that is defined there, by any path of the name. A re-export (`pub use`) does not define a
//! name. Unit tests may use any name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, UseTree, Visibility};

/// Crates that must have no circles, by their folders in crates/.
const CLEAN: &[&str] = &[
    "advise",
    "api",
    "archive",
    "base",
    "client",
    "control",
    "core",
    "daemon",
    "disks",
    "files",
    "foreign",
    "host",
    "img",
    "jobs",
    "limiter",
    "load",
    "luks",
    "metrics",
    "nbd",
    "requests",
    "sandbox",
    "sockets",
    "spec",
    "stack",
    "supervisor",
    "trace",
    "units",
];

/// The path of a module from the crate's root.
type Module = Vec<String>;

/// The names in a file.
#[derive(Default)]
struct Names {
    /// Names imported from elsewhere, with their paths.
    taken: BTreeMap<String, Vec<String>>,
    /// The imported names that the file re-exports.
    shown: BTreeSet<String>,
    /// Paths that the file uses itself.
    used: Vec<Vec<String>>,
}

impl Names {
    fn take(&mut self, tree: &UseTree, before: &[String], shows: bool) {
        let with = |name: String| [before, &[name]].concat();
        let (name, path) = match tree {
            UseTree::Path(path) => {
                let before = with(path.ident.to_string());
                return self.take(&path.tree, &before, shows);
            }
            UseTree::Group(group) => {
                return group
                    .items
                    .iter()
                    .for_each(|tree| self.take(tree, before, shows));
            }
            UseTree::Glob(_) => return self.used.push(before.to_vec()),
            UseTree::Name(name) if name.ident == "self" => {
                (before.last().cloned().unwrap_or_default(), before.to_vec())
            }
            UseTree::Name(name) => (name.ident.to_string(), with(name.ident.to_string())),
            UseTree::Rename(name) => (name.rename.to_string(), with(name.ident.to_string())),
        };
        if shows {
            self.shown.insert(name.clone());
        } else {
            self.used.push(path.clone());
        }
        self.taken.insert(name, path);
    }
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let list = attribute.meta.require_list().ok();
        attribute.path().is_ident("cfg") && list.is_some_and(|l| l.tokens.to_string() == "test")
    })
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Mod(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let shows = !matches!(item.vis, Visibility::Inherited);
        self.take(&item.tree, &[], shows);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path.segments.iter().map(|one| one.ident.to_string());
        let names: Vec<_> = names.collect();
        if names.len() > 1 {
            self.used.push(names);
        }
        visit::visit_path(self, path);
    }
}

/// A crate's files, by module.
struct Crate(BTreeMap<Module, Names>);

impl Crate {
    fn read(src: &Path) -> Crate {
        let mut modules = BTreeMap::new();
        for file in sources(src) {
            let mut names = Names::default();
            let text = fs::read_to_string(&file).unwrap();
            names.visit_file(&syn::parse_file(&text).unwrap());
            modules.insert(module_of(file.strip_prefix(src).unwrap()), names);
        }
        Crate(modules)
    }

    /// Returns the module in which a path ends, past all re-exports.
    ///
    /// Returns `None` if the path leaves the crate.
    fn resolve(&self, module: &[String], path: &[String], depth: u32) -> Option<Module> {
        let mut at = module.to_vec();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            first => {
                let taken = self.0.get(module)?.taken.get(first);
                let is_child = self.0.contains_key(&[module, &path[..1]].concat());
                return match taken.filter(|taken| !is_child && *taken != path && depth < 8) {
                    Some(taken) => self.resolve(module, &[taken, &path[1..]].concat(), depth + 1),
                    None if is_child => self.descend(at, path, depth),
                    None => None,
                };
            }
        }
        rest = &rest[1..];
        while rest.first().is_some_and(|name| name == "super") {
            at.pop();
            rest = &rest[1..];
        }
        self.descend(at, rest, depth)
    }

    fn descend(&self, mut at: Module, rest: &[String], depth: u32) -> Option<Module> {
        for (index, name) in rest.iter().enumerate() {
            let child = [&at[..], std::slice::from_ref(name)].concat();
            let names = self.0.get(&at)?;
            if self.0.contains_key(&child) {
                at = child;
            } else if names.shown.contains(name) && depth < 8 {
                let path = [&names.taken[name][..], &rest[index + 1..]].concat();
                return self.resolve(&at, &path, depth + 1);
            } else {
                break;
            }
        }
        Some(at)
    }

    /// Returns the modules on which each module depends.
    fn needs(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let needs = self.0.iter().map(|(module, names)| {
            let paths = names.used.iter();
            let found = paths.filter_map(|path| self.resolve(module, path, 0));
            let others = found.filter(|other| other != module && self.0.contains_key(other));
            (module, others.collect())
        });
        needs.collect()
    }

    /// Returns the modules of a circle, if there is one.
    fn circle(&self) -> Option<Vec<String>> {
        let mut needs = self.needs();
        // A module without remaining dependencies is in no circle, so it is removed, again and
        // again.
        loop {
            let free: Vec<Module> = { needs.iter() }
                .filter(|(_, others)| others.is_empty())
                .map(|(module, _)| (*module).clone())
                .collect();
            if free.is_empty() {
                break;
            }
            needs.retain(|module, _| !free.contains(module));
            let rest = needs.values_mut();
            rest.for_each(|others| others.retain(|other| !free.contains(other)));
        }
        // Every remaining module is in a circle or depends on one, so following dependencies leads
        // to one.
        let (mut at, mut path) = (needs.keys().next()?.to_vec(), Vec::new());
        loop {
            if let Some(start) = path.iter().position(|seen| *seen == at) {
                let names = path[start..]
                    .iter()
                    .map(|module: &Module| module.join("::"));
                return Some(names.collect());
            }
            let next = needs.get(&at)?.iter().next()?.clone();
            path.push(std::mem::replace(&mut at, next));
        }
    }
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.push(path);
        }
    }
    found
}

/// Returns the module of a file: `a/mod.rs` and `a.rs` are `a`, and `lib.rs` is the root.
fn module_of(file: &Path) -> Module {
    let file = file.with_extension("");
    let mut names: Module = file
        .iter()
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.pop_if(|last| ["mod", "lib"].contains(&last.as_str()));
    names
}

#[test]
fn files_do_not_need_each_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for name in CLEAN {
        let found = Crate::read(&root.join("crates").join(name).join("src"));
        assert!(
            found.0.len() > 1,
            "{name}: is the test looking in the right place?"
        );
        if let Some(circle) = found.circle() {
            panic!(
                "crates/{name}: these need each other: {}",
                circle.join(" -> ")
            );
        }
    }
}

fn of(files: &[(&str, &str)]) -> Crate {
    let modules = files.iter().map(|(module, text)| {
        let mut names = Names::default();
        names.visit_file(&syn::parse_str(text).unwrap());
        (module_of(Path::new(module)), names)
    });
    Crate(modules.collect())
}

#[test]
fn circles_are_found_past_what_others_show() {
    let lib = ("lib.rs", "mod a; mod b; pub use b::B;");
    let a = ("a.rs", "use crate::B; pub struct A(B);");
    let circle = |b: &str| of(&[lib, a, ("b.rs", b)]).circle();
    assert_eq!(circle("pub struct B;"), None);
    let both = ["a".to_owned(), "b".to_owned()];
    for b in [
        "use super::a::A; pub struct B(Box<A>);",
        "pub struct B(Box<crate::a::A>);",
        "use crate::a; pub struct B(Box<a::A>);",
        "pub fn b() { use crate::a::A; }",
        "use crate::a::*;",
    ] {
        assert_eq!(circle(b).as_deref(), Some(&both[..]), "{b}");
    }
    let tests = "pub struct B; #[cfg(test)] mod tests { use crate::a::A; }";
    assert_eq!(circle(tests), None);
}

#[test]
fn a_folder_and_what_is_in_it_are_files_like_others() {
    let parent = "mod child; use child::C; pub struct P(C); pub use child::Shown;";
    let files = |child: &'static str| of(&[("a/mod.rs", parent), ("a/child.rs", child)]);
    assert_eq!(files("pub struct C; pub struct Shown;").circle(), None);
    assert_eq!(files("use super::Shown; pub struct C;").circle(), None);
    assert!(
        files("use super::P; pub struct C(Box<P>);")
            .circle()
            .is_some()
    );
}
