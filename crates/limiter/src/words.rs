//! The words for limiters, the same in the live views, in reports and in the documentation.

/// A limiter or a state of a disk, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// The name of a rule or state.
    pub name: &'static str,
    /// Meaning of the name, in one sentence.
    pub means: &'static str,
    /// Advice, in one sentence.
    pub advice: &'static str,
}

/// Name of the verdict if no rule holds.
pub const UNKNOWN: &str = "unknown";

/// All rules in rank order, then the verdict without a rule, then the states of a disk that has no
/// load. The documentation has a section for each.
pub static WORDS: &[Words] = &[
    words(
        "device",
        "The requests spend their time in the block device, and the host alone gets no more out of \
         it.",
        "Use a faster device, or spread the disks over several devices.",
    ),
    words(
        "filter",
        "A filter of Fathom holds the requests back.",
        "Raise its limit or remove it with `fathom set`.",
    ),
    words(
        "io-cap",
        "The I/O limit of a control group holds the requests back.",
        "Raise the limit of the group that the verdict names.",
    ),
    words(
        "cpu-cap",
        "The CPU limit of a control group stops the threads that serve the disk.",
        "Raise the limit of the group that the verdict names.",
    ),
    words(
        "run-queue",
        "Threads on the path of the requests wait for a CPU of the host.",
        "Give the virtual machine and the server CPUs of their own, or run fewer programs.",
    ),
    words(
        "steal",
        "The hypervisor runs something else while a CPU of the guest or of the host is ready.",
        "Ask for CPUs that are not shared, or move the machine to a host with free CPUs.",
    ),
    words(
        "load-thread",
        "The load itself has no CPU time left.",
        "Add threads to the load; the disk is faster than this figure.",
    ),
    words(
        "thread",
        "A thread that serves the disk has work all the time.",
        "Add I/O threads and queues, or move other disks of the pool to another thread.",
    ),
    words(
        "lock",
        "Requests wait for a lock that one thread at a time may hold.",
        "Use separate files, queues or processes, so that fewer threads need the same lock.",
    ),
    words(
        "neighbour",
        "Other programs use most of the block device, and the requests wait with theirs.",
        "Limit the other programs' I/O, or move the disk to another device.",
    ),
    words(
        "pressure",
        "Tasks of the host wait for memory, or for a CPU that other programs use.",
        "Free memory or CPUs on the host, or raise the memory limit of the group.",
    ),
    words(
        "tables",
        "Lookups in the tables of the image take most of the time.",
        "Raise the cache of the tables with `--metadata-cache`.",
    ),
    words(
        "client",
        "The client keeps few requests in flight, so that the disk waits for it.",
        "Look at the program in the guest: the disk is not the limit.",
    ),
    words(
        "latency",
        "Requests take their time one after the other, and nothing is busy.",
        "Keep more requests in flight, or shorten the largest layer, which the verdict names.",
    ),
    words(
        UNKNOWN,
        "No rule holds, or the evidence that a rule needs was not seen; the verdict names it.",
        "Record the missing evidence, for instance with `fathom lab run` as root.",
    ),
    words(
        "stuck",
        "Requests are in flight, and none has completed in the interval.",
        "Look at the storage with `fathom stats` and at the log of the server.",
    ),
    words(
        "frozen",
        "The disk is frozen, and its requests wait.",
        "Resume it with `fathom disk thaw`.",
    ),
    words(
        "idle",
        "The disk had no requests.",
        "Start the load: the disk waits for requests.",
    ),
];

const fn words(name: &'static str, means: &'static str, advice: &'static str) -> Words {
    Words {
        name,
        means,
        advice,
    }
}

/// Returns the name of a limiter and its evidence in a line, such as
/// `client: keeps 0.2 requests in flight`. Live views and reports show this line. A text that has
/// the name already is returned as it is.
pub fn named(name: &str, text: &str) -> String {
    let begins = { text.strip_prefix(name) }
        .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '-'));
    let (head, _) = text.split_once(": ").unwrap_or_default();
    if begins
        || head
            .strip_suffix(name)
            .is_some_and(|head| head.ends_with(' '))
    {
        return text.to_owned();
    }
    let in_words = format!("{}: ", name.replace('-', " "));
    format!("{name}: {}", text.strip_prefix(&in_words).unwrap_or(text))
}

/// Returns the words for a rule or state.
pub fn words_for(name: &str) -> Option<&'static Words> {
    WORDS.iter().find(|words| words.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names;

    #[test]
    fn every_rule_has_words_in_rank_order() {
        let rules = names();
        let all: Vec<&str> = WORDS.iter().map(|words| words.name).collect();
        assert_eq!(all[..rules.len()], rules);
        assert_eq!(all[rules.len()..], [UNKNOWN, "stuck", "frozen", "idle"]);
    }

    #[test]
    fn name_of_a_limiter_comes_once() {
        for text in [
            "client: keeps 0.2 requests in flight",
            "device vda: 31.8 of 32 in flight",
            "tables of the image: 78% of the request's time",
            "unknown, not seen: the device",
            "delay:read=30ms filter: 97% of the request's time",
        ] {
            let name = text.split([' ', ':', ',']).next().unwrap();
            let name = if name == "delay" { "filter" } else { name };
            assert_eq!(named(name, text), text);
        }
        let thread = "I/O thread 'worker 0' on CPU 98%";
        assert_eq!(named("thread", thread), format!("thread: {thread}"));
        let queue = named("run-queue", "run queue: vCPU 'CPU 0/KVM' waited for a CPU");
        assert_eq!(queue, "run-queue: vCPU 'CPU 0/KVM' waited for a CPU");
        assert_eq!(named("device", ""), "device: ");
    }

    #[test]
    fn the_documentation_has_a_section_for_each() {
        let page = include_str!("../../../docs/limiters.md");
        let sections: Vec<&str> = page.split("\n## ").skip(1).collect();
        let of_words = |section: &&str| WORDS.iter().any(|one| section.starts_with(one.name));
        let sections: Vec<&str> = sections.into_iter().filter(of_words).collect();
        assert_eq!(sections.len(), WORDS.len());
        for (section, words) in sections.iter().zip(WORDS) {
            let (title, text) = section.split_once('\n').unwrap();
            assert_eq!(title, words.name);
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            for sentence in [words.means, words.advice] {
                assert!(text.contains(sentence), "{title}: {sentence}");
            }
        }
    }
}
