//! Kernel probes. The kernel has one list of probes for all instances. Probes of this module are in
//! groups that are named after their instance.

use std::fs;
use std::io;
use std::path::Path;

use super::put;

pub(super) const EVENTS: &str = "kprobe_events";

/// Sets a probe on the entry of a function. The probe has the function's name.
pub(super) fn add(root: &Path, group: &str, function: &str, arguments: &str) -> io::Result<()> {
    let probe = format!("p:{group}/{function} {function} {arguments}\n");
    append(root, &probe)
}

/// Removes a group's probes, which must be disabled in every instance.
pub(super) fn remove_group(root: &Path, group: &str) {
    for (_, probe) in list(root).into_iter().filter(|(of, _)| of == group) {
        let _ = append(root, &format!("-:{group}/{probe}\n"));
    }
}

/// Returns the groups and names of all probes.
pub(super) fn list(root: &Path) -> Vec<(String, String)> {
    let text = fs::read_to_string(root.join(EVENTS)).unwrap_or_default();
    text.lines().filter_map(parse).collect()
}

/// Parses `p:GROUP/NAME function arguments`.
fn parse(line: &str) -> Option<(String, String)> {
    let (_, name) = line.split_whitespace().next()?.split_once(':')?;
    let (group, name) = name.split_once('/')?;
    Some((group.to_owned(), name.to_owned()))
}

/// Appends to the list. Opening it with truncation would remove the probes of all programs.
fn append(root: &Path, line: &str) -> io::Result<()> {
    put(&root.join(EVENTS), line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_listed_with_their_group() {
        let parsed = parse("p:fathom_1_0_guest/vp_notify vp_notify vq=%di");
        assert_eq!(
            parsed,
            Some(("fathom_1_0_guest".into(), "vp_notify".into()))
        );
        let counted = parse("r16:kprobes/one do_sys_open $retval");
        assert_eq!(counted, Some(("kprobes".into(), "one".into())));
        assert_eq!(parse(""), None);
    }
}
