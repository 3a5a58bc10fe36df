//! Finds the files that a dynamic program needs to run elsewhere: its loader and its libraries.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Error, Result};

/// Constants of ELF64 files and their program headers (System V ABI, chapters 4 and 5).
const MAGIC: &[u8] = b"\x7fELF\x02\x01";
const PT_INTERP: u32 = 3;
const MAX_HEADERS: u64 = 128;
const MAX_PATH: u64 = 4096;

/// Returns the program's loader and every library that it loads. The list is empty for a static
/// program or a script.
///
/// # Errors
/// When the program cannot be read or a library is missing.
pub fn of(program: &Path) -> Result<Vec<PathBuf>> {
    let Some(loader) = loader(program)? else {
        return Ok(Vec::new());
    };
    // Does the same as ldd, without the shell that ldd needs.
    let output = Command::new(&loader)
        .arg("--list")
        .arg(program)
        .output()
        .context(|| format!("cannot run {}", loader.display()))?;
    if !output.status.success() {
        return Err(Error::Unusable {
            path: program.to_owned(),
            reason: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(line) = text.lines().find(|line| line.contains("=> not found")) {
        let reason = format!("a library is missing: {}", line.trim());
        return Err(Error::Unusable {
            path: program.to_owned(),
            reason,
        });
    }
    let mut paths = parse_list(&text);
    // The list shows the loader's mapped path; programs name it by this one.
    if !paths.contains(&loader) {
        paths.push(loader);
    }
    Ok(paths)
}

/// Returns the program's loader, or `None` if it is static or not an ELF file for x86-64.
///
/// # Errors
/// When the program cannot be read.
pub fn loader(program: &Path) -> Result<Option<PathBuf>> {
    let what = || format!("cannot read {}", program.display());
    let file = File::open(program).context(what)?;
    let mut header = [0; 64];
    if file.read_at(&mut header, 0).context(what)? < header.len() || !header.starts_with(MAGIC) {
        return Ok(None);
    }
    let word = |bytes: &[u8], at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let (table, size, count) = (word(&header, 32), half(54), half(56));
    if size < 56 || count > MAX_HEADERS {
        return Ok(None);
    }
    for index in 0..count {
        let mut entry = [0; 56];
        let at = table.saturating_add(index * size);
        if file.read_exact_at(&mut entry, at).is_err() {
            return Ok(None); // truncated ELF file: running it will report the error
        }
        let kind = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
        let (offset, length) = (word(&entry, 8), word(&entry, 32).min(MAX_PATH));
        if kind == PT_INTERP {
            let mut path = vec![0; usize::try_from(length).unwrap_or(0)];
            file.read_exact_at(&mut path, offset).context(what)?;
            let path = String::from_utf8_lossy(&path);
            return Ok(Some(PathBuf::from(path.trim_end_matches('\0'))));
        }
    }
    Ok(None)
}

/// Parses lines "name => path (address)" or, for the loader, "path (address)". The vdso has no
/// path.
fn parse_list(text: &str) -> Vec<PathBuf> {
    text.lines()
        .filter_map(|line| {
            let target = line.split_once("=>").map_or(line, |(_, path)| path).trim();
            let path = target.split(" (").next()?.trim();
            path.starts_with('/').then(|| PathBuf::from(path))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_every_kind() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let paths: Vec<_> = parse_list(text)
            .iter()
            .map(|p| p.display().to_string())
            .collect();
        assert_eq!(
            paths,
            [
                "/lib/x86_64-linux-gnu/libc.so.6",
                "/lib64/ld-linux-x86-64.so.2"
            ]
        );
        assert!(parse_list("\tnot a dynamic executable\n").is_empty());
    }

    /// The oracle is ldd, which obtains the same list in another way.
    #[test]
    fn a_program_has_the_libraries_that_ldd_finds() {
        let program = crate::host::program("qemu-system-x86_64").unwrap();
        let mut ours = of(&program).unwrap();
        let mut theirs =
            parse_list(&crate::host::run("ldd", &[&program.to_string_lossy()]).unwrap());
        ours.sort();
        theirs.sort();
        assert!(theirs.len() > 5);
        assert_eq!(ours, theirs);
    }

    #[test]
    fn static_programs_and_scripts_have_none() {
        assert_eq!(
            loader(&crate::host::program("busybox").unwrap()).unwrap(),
            None
        );
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        assert!(of(&script).unwrap().is_empty());
    }
}
