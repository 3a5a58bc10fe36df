//! The examples of the commands for images.

pub static EXAMPLES: &[(&str, &[&str])] = &[
    (
        "fathom img create",
        &[
            "fathom img create -f qcow2 vm1.qcow2 20G",
            "fathom img create -f qcow2 -b base.qcow2 -F qcow2 vm1.qcow2",
        ],
    ),
    (
        "fathom img amend",
        &[
            "fathom img amend -o compat=1.1,lazy_refcounts=on vm1.qcow2",
            "fathom img amend -o refcount_bits=64 vm1.qcow2",
        ],
    ),
    (
        "fathom img bench",
        &[
            "fathom img bench vm1.qcow2",
            "fathom img bench -w -c 10000 -d 16 -s 64k scratch.qcow2     # overwrites the disk",
        ],
    ),
    (
        "fathom img commit",
        &[
            "fathom img commit top.qcow2",
            "fathom img commit -b base.qcow2 top.qcow2",
        ],
    ),
    (
        "fathom img compare",
        &[
            "fathom img compare vm1.raw vm1.qcow2",
            "fathom img compare -f raw vm1.raw nbd://host/vm1",
        ],
    ),
    (
        "fathom img convert",
        &[
            "fathom img convert -O qcow2 vm1.raw vm1.qcow2",
            "fathom img convert -c -O qcow2 -o compression_type=zstd vm1.raw small.qcow2",
            "fathom img convert nbd://host/vm1 vm1.raw",
        ],
    ),
    (
        "fathom img dd",
        &[
            "fathom img dd -f qcow2 if=vm1.qcow2 of=start.raw bs=1M count=8",
            "fathom img dd -f raw -O qcow2 if=vm1.raw of=rest.qcow2 bs=1M skip=8",
        ],
    ),
    (
        "fathom img info",
        &[
            "fathom img info vm1.qcow2",
            "fathom img info -U --backing-chain vm1.qcow2     # in use by a guest",
        ],
    ),
    (
        "fathom img check",
        &[
            "fathom img check vm1.qcow2",
            "fathom img check --repair all vm1.qcow2",
        ],
    ),
    (
        "fathom img map",
        &[
            "fathom img map vm1.qcow2",
            "fathom img map --start-offset 1G --max-length 64M --json vm1.qcow2",
        ],
    ),
    (
        "fathom img bitmap",
        &[
            "fathom img bitmap --add vm1.qcow2 week",
            "fathom img bitmap --list vm1.qcow2",
            "fathom img bitmap --merge monday vm1.qcow2 week",
        ],
    ),
    (
        "fathom img measure",
        &[
            "fathom img measure -O qcow2 vm1.raw",
            "fathom img measure -O qcow2 -o cluster_size=2M --size 1T",
        ],
    ),
    (
        "fathom img rebase",
        &[
            "fathom img rebase -b base-2.qcow2 -F qcow2 top.qcow2",
            "fathom img rebase -b '' top.qcow2     # no backing image",
        ],
    ),
    (
        "fathom img resize",
        &[
            "fathom img resize vm1.qcow2 20G",
            "fathom img resize vm1.qcow2 +512M",
            "fathom img resize --shrink vm1.qcow2 8G",
        ],
    ),
    (
        "fathom img snapshot",
        &[
            "fathom img snapshot --create before-update vm1.qcow2",
            "fathom img snapshot --list vm1.qcow2",
            "fathom img snapshot --apply before-update vm1.qcow2",
        ],
    ),
    (
        "fathom img archive",
        &[
            "fathom img archive vm1.qcow2 /srv/archive monday",
            "fathom img archive --list /srv/archive",
        ],
    ),
    (
        "fathom img restore",
        &[
            "fathom img restore /srv/archive/images/monday.manifest vm1.raw",
            "fathom img restore -O qcow2 /srv/archive/images/monday.manifest vm1.qcow2",
        ],
    ),
    (
        "fathom img manifest",
        &[
            "fathom img manifest base.raw base.raw.manifest",
            "fathom img manifest --stripe-size 64k base.raw base.raw.manifest",
        ],
    ),
];
