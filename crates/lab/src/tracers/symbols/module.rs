//! Reads the symbols of one program or library.

use std::path::{Path, PathBuf};

use object::{Object, ObjectSegment, ObjectSymbol};

/// Maximum size of a file in bytes, above that of a QEMU with all its debug information.
const MAX_FILE: u64 = 1 << 30;
/// Maximum length of a symbol's name in bytes, far above that of a meaningful name.
const MAX_NAME: usize = 200;

/// Symbols in order of their addresses in the file's own address space.
#[derive(Debug)]
pub(super) struct Module {
    symbols: Vec<Symbol>,
    /// Address of the file's first byte in the file's own address space.
    first: u64,
}

#[derive(Debug)]
struct Symbol {
    address: u64,
    size: u64,
    name: String,
}

impl Module {
    /// Reads a file's symbols. Returns `None` if the file is not a program. A program without
    /// symbols is still a module, because its offsets serve as names.
    pub fn load(path: &Path) -> Option<Module> {
        let bytes = read(path)?;
        let file = object::File::parse(bytes.as_slice()).ok()?;
        let first = file
            .segments()
            .map(|s| s.address().wrapping_sub(s.file_range().0))
            .min();
        let mut symbols: Vec<Symbol> = file.symbols().filter_map(symbol).collect();
        if symbols.is_empty() {
            symbols = debug_file(&file)
                .map(|path| separate(&path))
                .unwrap_or_default();
        }
        symbols.extend(file.dynamic_symbols().filter_map(symbol));
        symbols.sort_by_key(|symbol| (symbol.address, symbol.size));
        Some(Module {
            symbols,
            first: first.unwrap_or(0),
        })
    }

    /// Returns the symbol that contains the byte at this offset from the file's first byte, and the
    /// offset within the symbol.
    pub fn symbol(&self, offset: u64) -> Option<(&str, u64)> {
        let address = offset.wrapping_add(self.first);
        let after = self
            .symbols
            .partition_point(|symbol| symbol.address <= address);
        let symbol = self.symbols.get(after.checked_sub(1)?)?;
        let inside = address - symbol.address;
        (inside < symbol.size).then_some((symbol.name.as_str(), inside))
    }
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let size = std::fs::metadata(path).ok()?.len();
    (size <= MAX_FILE)
        .then(|| std::fs::read(path).ok())
        .flatten()
}

fn symbol<'data>(symbol: impl ObjectSymbol<'data>) -> Option<Symbol> {
    let name = symbol.name().ok().filter(|name| !name.is_empty())?;
    let good = symbol.is_definition() && symbol.size() > 0 && name.len() <= MAX_NAME;
    good.then(|| Symbol {
        address: symbol.address(),
        size: symbol.size(),
        name: name.to_owned(),
    })
}

/// Returns the path where distributions store the debug information of a stripped file.
fn debug_file(file: &object::File) -> Option<PathBuf> {
    let id = file.build_id().ok()??;
    let (first, rest) = id.split_first()?;
    let rest: String = rest.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(PathBuf::from(format!(
        "/usr/lib/debug/.build-id/{first:02x}/{rest}.debug"
    )))
}

fn separate(path: &Path) -> Vec<Symbol> {
    let Some(bytes) = read(path) else {
        return Vec::new();
    };
    match object::File::parse(bytes.as_slice()) {
        Ok(file) => file.symbols().filter_map(symbol).collect(),
        Err(_) => Vec::new(),
    }
}
