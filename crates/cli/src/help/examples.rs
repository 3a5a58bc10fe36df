//! The examples at the end of each command's help and in its manual page.

use clap::Command;

type Examples = (&'static str, &'static [&'static str]);

/// Commands with their examples. A comment after `#` explains what is not obvious.
static EXAMPLES: &[Examples] = &[
    (
        "fathom",
        &[
            "fathom serve -f qcow2 vm1.qcow2 --vhost-user /tmp/vm1.sock",
            "fathom show vm1.qcow2 --qemu     # the options for QEMU",
            "fathom top",
        ],
    ),
    (
        "fathom serve",
        &[
            "fathom serve -f qcow2 vm1.qcow2 --vhost-user /tmp/vm1.sock",
            "fathom serve vm1.raw --readonly --nbd tcp:0.0.0.0:10809 --export-name vm1",
            "fathom serve --config /etc/fathom/fathom.toml",
        ],
    ),
    (
        "fathom disk",
        &[
            "fathom disk add vm2 /srv/vm2.qcow2 -f qcow2 --vhost-user /tmp/vm2.sock",
            "fathom disk change vm2 readonly=true",
            "fathom disk remove vm2",
        ],
    ),
    (
        "fathom disk add",
        &[
            "fathom disk add vm2 /srv/vm2.qcow2 -f qcow2 --vhost-user /tmp/vm2.sock",
            "fathom disk add scratch memory:4G --vhost-user /tmp/scratch.sock --transient",
        ],
    ),
    (
        "fathom disk list",
        &["fathom disk list", "fathom disk list --json"],
    ),
    (
        "fathom disk show",
        &["fathom disk show vm1", "fathom disk show vm1 --qemu"],
    ),
    (
        "fathom disk change",
        &[
            "fathom disk change vm1 cache=writeback iothreads=2",
            "fathom disk change vm1 cache=     # the default",
        ],
    ),
    (
        "fathom disk set",
        &[
            "fathom disk set vm1 throttle iops-total=500",
            "fathom disk set vm1 throttle iops-total=     # no limit",
        ],
    ),
    (
        "fathom disk resize",
        &[
            "fathom disk resize vm1 20G",
            "fathom disk resize vm1 8G --shrink",
        ],
    ),
    (
        "fathom disk freeze",
        &["fathom disk freeze vm1", "fathom disk freeze vm1 --for 30s"],
    ),
    (
        "fathom disk adopt",
        &[
            "fathom disk adopt vm1",
            "fathom disk adopt vm1 --server 1234",
        ],
    ),
    (
        "fathom disk thaw",
        &["fathom disk thaw vm1", "fathom disk thaw vm1 --server 1234"],
    ),
    (
        "fathom disk remove",
        &["fathom disk remove vm1", "fathom disk remove vm1 --force"],
    ),
    (
        "fathom list",
        &[
            "fathom list",
            "sudo fathom list     # servers of root",
            "fathom list --json",
        ],
    ),
    (
        "fathom show",
        &[
            "fathom show vm1",
            "fathom show vm1 --libvirt",
            "fathom show 1234 --json     # all disks of a server",
        ],
    ),
    (
        "fathom set",
        &[
            "fathom set vm1 throttle iops-total=500",
            "fathom set vm1 throttle iops-total=     # no limit",
        ],
    ),
    (
        "fathom group",
        &[
            "fathom group list",
            "fathom group set backups bps-total=100M",
        ],
    ),
    (
        "fathom group list",
        &["fathom group list", "fathom group list --server 1234"],
    ),
    (
        "fathom group set",
        &[
            "fathom group set backups bps-total=100M",
            "fathom group set backups bps-total= --transient",
        ],
    ),
    (
        "fathom resize",
        &["fathom resize vm1 20G", "fathom resize vm1 8G --shrink"],
    ),
    (
        "fathom quit",
        &[
            "fathom quit 1234",
            "fathom quit vm1     # the only disk of its server",
        ],
    ),
    (
        "fathom upgrade",
        &["fathom upgrade 1234", "fathom upgrade --all"],
    ),
    (
        "fathom filters",
        &["fathom filters", "fathom filters throttle"],
    ),
    (
        "fathom backup",
        &[
            "fathom backup full vm1 sunday.qcow2 --bitmap week",
            "fathom backup incremental vm1 monday.qcow2 --bitmap week --base sunday.qcow2",
        ],
    ),
    (
        "fathom backup start",
        &[
            "fathom backup start vm1     # prints the NBD URI to read",
            "fathom backup start vm1 --bitmap week --guest-agent unix:/run/vm1.agent",
        ],
    ),
    (
        "fathom backup stop",
        &[
            "fathom backup stop vm1",
            "fathom backup stop vm1 --with vm2",
        ],
    ),
    (
        "fathom backup full",
        &[
            "fathom backup full vm1 vm1.qcow2 --compress --verify",
            "fathom backup full vm1 sunday.qcow2 --bitmap week",
            "fathom backup full vm1 sunday --archive s3://backups/vms",
        ],
    ),
    (
        "fathom backup incremental",
        &[
            "fathom backup incremental vm1 monday.qcow2 --bitmap week --base sunday.qcow2",
            "fathom backup incremental vm1 tuesday.qcow2 --bitmap week --base monday.qcow2 --verify",
        ],
    ),
    (
        "fathom bitmap",
        &["fathom bitmap add vm1 week", "fathom bitmap list vm1"],
    ),
    (
        "fathom bitmap list",
        &["fathom bitmap list vm1", "fathom bitmap list vm1 --json"],
    ),
    (
        "fathom bitmap add",
        &[
            "fathom bitmap add vm1 week",
            "fathom bitmap add vm1 week --granularity 1M",
        ],
    ),
    (
        "fathom bitmap remove",
        &[
            "fathom bitmap remove vm1 week",
            "fathom bitmap remove vm1 --server 1234 week",
        ],
    ),
    (
        "fathom bitmap advance",
        &[
            "fathom bitmap advance vm1 week",
            "fathom bitmap advance vm1 week --to 3",
        ],
    ),
    (
        "fathom bitmap clear",
        &[
            "fathom bitmap clear vm1 week",
            "fathom bitmap clear vm1 --server 1234 week",
        ],
    ),
    (
        "fathom bitmap rename",
        &[
            "fathom bitmap rename vm1 week month",
            "fathom bitmap rename vm1 --server 1234 week month",
        ],
    ),
    (
        "fathom bitmap merge",
        &[
            "fathom bitmap merge vm1 week monday",
            "fathom bitmap merge vm1 week monday tuesday",
        ],
    ),
    (
        "fathom snapshot",
        &[
            "fathom snapshot vm1 /srv/vm1-2.qcow2",
            "fathom snapshot vm1 --internal before-update",
            "fathom snapshot vm1 --list",
        ],
    ),
    (
        "fathom mirror",
        &[
            "fathom mirror start vm1 /ssd/vm1.qcow2 -O qcow2 --wait",
            "fathom mirror complete vm1",
        ],
    ),
    (
        "fathom mirror start",
        &[
            "fathom mirror start vm1 /ssd/vm1.qcow2 -O qcow2 --wait",
            "fathom mirror start vm1 nbd://host2/vm1 --speed 100M",
        ],
    ),
    (
        "fathom mirror show",
        &["fathom mirror show vm1", "fathom mirror show vm1 --json"],
    ),
    (
        "fathom mirror complete",
        &[
            "fathom mirror complete vm1",
            "fathom mirror complete vm1 --progress",
        ],
    ),
    (
        "fathom mirror stop",
        &["fathom mirror stop vm1", "fathom mirror stop vm1 --force"],
    ),
    (
        "fathom commit",
        &[
            "fathom commit vm1 /srv/base.qcow2",
            "fathom commit vm1 /srv/base.qcow2 --top /srv/monday.qcow2",
        ],
    ),
    (
        "fathom stream",
        &["fathom stream start vm1 --wait", "fathom stream show vm1"],
    ),
    (
        "fathom stream start",
        &[
            "fathom stream start vm1 --wait     # no backing image in the end",
            "fathom stream start vm1 --base /srv/base.qcow2",
        ],
    ),
    (
        "fathom stream show",
        &["fathom stream show vm1", "fathom stream show vm1 --json"],
    ),
    (
        "fathom stream stop",
        &[
            "fathom stream stop vm1",
            "fathom stream stop vm1 --server 1234",
        ],
    ),
    ("fathom jobs", &["fathom jobs", "fathom jobs --json"]),
    (
        "fathom jobs speed",
        &[
            "fathom jobs speed vm1.mirror 100M",
            "fathom jobs speed vm1.stream none",
        ],
    ),
    (
        "fathom jobs end",
        &[
            "fathom jobs end vm1.backup",
            "fathom jobs end vm1.mirror --force",
        ],
    ),
    (
        "fathom top",
        &[
            "fathom top",
            "fathom top vm1 --interval 500ms",
            "fathom top --once --sort p99",
        ],
    ),
    (
        "fathom advise",
        &[
            "fathom advise vm1",
            "fathom advise vm1 --try",
            "fathom advise vm1 --watch 10s --try --pairs 8 --round 5s --keep",
        ],
    ),
    (
        "fathom stats",
        &["fathom stats vm1", "fathom stats vm1 --watch 5"],
    ),
    (
        "fathom slow",
        &["fathom slow vm1", "fathom slow vm1 --last -n 50"],
    ),
    (
        "fathom trace",
        &[
            "fathom trace --disk vm1 --on /dev/shm/vm1.trace",
            "fathom trace /dev/shm/vm1.trace --follow",
            "fathom trace --disk vm1 --off",
        ],
    ),
    (
        "fathom breakdown",
        &[
            "fathom breakdown --pid 1234     # a running QEMU",
            "fathom breakdown --server vm1 --seconds 10",
            "fathom breakdown --join host.run guest.run",
        ],
    ),
    (
        "fathom guest",
        &["fathom guest record --device vda --seconds 10"],
    ),
    (
        "fathom guest record",
        &[
            "fathom guest record --device vda --seconds 10",
            "fathom guest record --output /tmp/guest.run --buffer 512",
        ],
    ),
    (
        "fathom bench",
        &[
            "fathom bench --vhost-user /tmp/vm1.sock --rw randread --bs 4k --iodepth 32",
            "fathom bench --nbd nbd://host/vm1 --rw write --bs 1M --runtime 30s --overwrite",
            "fathom bench /dev/nvme0n1 --rw randread --output nvme.run",
        ],
    ),
    (
        "fathom lab",
        &[
            "fathom lab list",
            "fathom lab describe seqread",
            "fathom lab run seqread",
        ],
    ),
    (
        "fathom lab list",
        &["fathom lab list", "fathom lab list --json"],
    ),
    (
        "fathom lab describe",
        &[
            "fathom lab describe seqread",
            "fathom lab describe wiki --json",
        ],
    ),
    (
        "fathom lab run",
        &[
            "fathom lab run seqread --disk fathom,qemu --until 5% --max-time 2h",
            "fathom lab run seqread --disk fathom,qemu --against old.run",
            "fathom lab run --continue seqread.run",
        ],
    ),
    (
        "fathom report",
        &[
            "fathom report wiki.run",
            "fathom report old.run new.run",
            "fathom report wiki.run --html wiki.html",
        ],
    ),
    (
        "fathom img",
        &[
            "fathom img create -f qcow2 vm1.qcow2 20G",
            "fathom img convert -O qcow2 vm1.raw vm1.qcow2",
            "fathom img check vm1.qcow2",
        ],
    ),
    (
        "fathom base",
        &[
            "fathom base list",
            "fathom base remove https://example.com/base.qcow2",
        ],
    ),
    (
        "fathom base list",
        &["fathom base list", "fathom base list --json"],
    ),
    (
        "fathom base remove",
        &[
            "fathom base remove https://example.com/base.qcow2",
            "fathom base remove s3://images/base.qcow2 --base-cache /srv/cache",
        ],
    ),
    (
        "fathom base profile",
        &[
            "fathom base profile https://example.com/base.qcow2 > base.profile",
            "fathom base profile s3://images/base.qcow2 --base-cache /srv/cache > base.profile",
        ],
    ),
    (
        "fathom fleet",
        &[
            "fathom fleet list --hosts host1,host2",
            "fathom fleet top --hosts hosts.txt --sort p99",
        ],
    ),
    (
        "fathom fleet list",
        &[
            "fathom fleet list --hosts host1,host2",
            "fathom fleet list --hosts hosts.txt --filter vm1",
        ],
    ),
    (
        "fathom fleet stats",
        &[
            "fathom fleet stats --hosts host1,host2",
            "fathom fleet stats --hosts hosts.txt --worst 20 --watch 10",
        ],
    ),
    (
        "fathom fleet top",
        &[
            "fathom fleet top --hosts host1,host2",
            "fathom fleet top --hosts hosts.txt --sort p99 --once",
        ],
    ),
    (
        "fathom man",
        &[
            "fathom man serve",
            "fathom man disk add",
            "fathom man /usr/share/man/man1     # writes all pages",
        ],
    ),
    (
        "fathom completions",
        &[
            "fathom completions bash > /usr/share/bash-completion/completions/fathom",
            "fathom completions zsh > /usr/share/zsh/site-functions/_fathom",
        ],
    ),
];

/// Returns the examples of a command by its path, such as `fathom disk add`.
pub fn of(command: &Command, path: &str) -> Vec<String> {
    let all = EXAMPLES.iter().chain(super::image_examples::EXAMPLES);
    let mut found = all.filter(|(name, _)| *name == path);
    if let Some((_, examples)) = found.next() {
        return examples.iter().map(|one| (*one).to_owned()).collect();
    }
    match path.strip_prefix("fathom lab run ") {
        Some(experiment) => of_experiment(command, experiment),
        None => Vec::new(),
    }
}

/// Returns examples of an experiment. All experiments have the same examples, except for --rounds.
fn of_experiment(command: &Command, name: &str) -> Vec<String> {
    let run = format!("fathom lab run {name}");
    let has_rounds = command.get_arguments().any(|arg| arg.get_id() == "rounds");
    let rounds = has_rounds.then(|| format!("{run} --rounds 5 --output {name}.run"));
    let all = [Some(run.clone()), rounds, Some(format!("{run} --dry-run"))];
    all.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::help::tests::for_each_command;
    use clap::error::ErrorKind;
    use std::collections::BTreeSet;

    #[test]
    fn every_command_has_examples_that_are_correct() {
        let mut paths = BTreeSet::new();
        for_each_command(&mut |path, command| {
            paths.insert(path.to_owned());
            let examples = of(command, path);
            assert!((1..=3).contains(&examples.len()), "{path}: {examples:?}");
            for example in examples {
                assert!(example.len() <= 96, "too wide: {example}");
                check(path, &example);
            }
        });
        for (path, _) in EXAMPLES.iter().chain(crate::help::image_examples::EXAMPLES) {
            assert!(paths.contains(*path), "there is no command `{path}`");
        }
    }

    fn check(path: &str, example: &str) {
        let words = shlex::split(example).unwrap();
        let words = words.into_iter().skip_while(|word| word == "sudo");
        let words: Vec<_> = words
            .take_while(|word| !matches!(&**word, ">" | "|"))
            .collect();
        assert!(example.contains(path), "{path}: {example}");
        let parsed = crate::help::command().try_get_matches_from(&words);
        let error = parsed.err();
        if let Some(error) = error.filter(|error| error.kind() != ErrorKind::DisplayHelp) {
            panic!("{example}: {error}");
        }
    }
}
