//! The image kinds that are tested with power cuts and kills.

use super::case::{
    Backing, Case, DATA_FILE, ENCRYPTED, EXTENDED, Filled, GROWING, LARGE, LUKS, NARROW,
    PREALLOCATED, QCOW2, QED, SMALL, SNAPSHOT,
};

pub const MATRIX: &[Case] = &[
    SMALL,
    Case {
        name: "512-device",
        device: true,
        ..SMALL
    },
    Case {
        name: "4k-device",
        options: "cluster_size=4k",
        cluster: 4096,
        backing: Some(Backing::RAW),
        device: true,
        ..QCOW2
    },
    Case {
        name: "512-v2",
        options: "cluster_size=512,compat=0.10",
        cluster: 512,
        filled: Some(Filled::Plain),
        ..QCOW2
    },
    Case {
        tiny_cache: true,
        ..NARROW
    },
    Case {
        name: "512-rc64-compressed",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        filled: Some(Filled::Compressed),
        ..QCOW2
    },
    Case {
        name: "4k",
        options: "cluster_size=4k",
        cluster: 4096,
        own: true,
        ..QCOW2
    },
    Case {
        name: "4k-lazy",
        options: "cluster_size=4k,lazy_refcounts=on,refcount_bits=8",
        cluster: 4096,
        filled: Some(Filled::Plain),
        ..QCOW2
    },
    GROWING,
    Case {
        name: "512-evicting",
        wide: true,
        tiny_cache: true,
        ..SMALL
    },
    Case {
        name: "512-snapshot",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        filled: Some(Filled::Compressed),
        snapshot: true,
        ..QCOW2
    },
    SNAPSHOT,
    PREALLOCATED,
    Case {
        name: "4k-raw-below",
        options: "cluster_size=4k",
        cluster: 4096,
        backing: Some(Backing::RAW),
        ..QCOW2
    },
    Case {
        name: "4k-chain-below",
        options: "cluster_size=4k,compat=0.10",
        cluster: 4096,
        backing: Some(Backing {
            chain: true,
            compressed: true,
            ..Backing::QCOW2
        }),
        tiny_cache: true,
        ..QCOW2
    },
    Case {
        name: "4k-filled-below",
        options: "cluster_size=4k",
        cluster: 4096,
        filled: Some(Filled::Compressed),
        backing: Some(Backing::QCOW2),
        ..QCOW2
    },
    EXTENDED,
    Case {
        name: "16k-extended-below",
        backing: Some(Backing::RAW),
        ..EXTENDED
    },
    Case {
        name: "64k",
        ..QCOW2
    },
    LARGE,
    DATA_FILE,
    Case {
        name: "data-file-raw",
        options: "cluster_size=4k,data_file=data.raw,data_file_raw=on",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "qed-4k",
        format: "qed",
        options: "cluster_size=4k,table_size=4",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "qed-below",
        backing: Some(Backing::RAW),
        ..QED
    },
    Case {
        name: "qed-64k",
        format: "qed",
        ..QCOW2
    },
    Case {
        name: "raw",
        format: "raw",
        ..QCOW2
    },
    LUKS,
    ENCRYPTED,
    Case {
        name: "encrypted-on-luks",
        options: "extended_l2=on,encrypt.format=luks,encrypt.iter-time=10",
        backing: Some(Backing::LUKS),
        own: true,
        ..QCOW2
    },
];
