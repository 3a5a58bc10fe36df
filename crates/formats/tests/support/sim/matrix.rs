//! The kinds of image whose servers lose their power or are killed.

use super::case::{Backing, Case, Filled, QCOW2};

pub const MATRIX: &[Case] = &[
    Case {
        name: "512",
        options: "cluster_size=512",
        cluster: 512,
        ..QCOW2
    },
    Case {
        name: "512-device",
        options: "cluster_size=512",
        cluster: 512,
        device: true,
        ..QCOW2
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
        name: "512-rc1",
        options: "cluster_size=512,refcount_bits=1",
        cluster: 512,
        tiny_cache: true,
        ..QCOW2
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
    Case {
        name: "512-growing",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        wide: true,
        ..QCOW2
    },
    Case {
        name: "512-evicting",
        options: "cluster_size=512",
        cluster: 512,
        wide: true,
        tiny_cache: true,
        ..QCOW2
    },
    Case {
        name: "512-snapshot",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        filled: Some(Filled::Compressed),
        snapshot: true,
        ..QCOW2
    },
    Case {
        name: "4k-snapshot",
        options: "cluster_size=4k",
        cluster: 4096,
        filled: Some(Filled::Plain),
        snapshot: true,
        ..QCOW2
    },
    Case {
        name: "4k-preallocated",
        options: "cluster_size=4k,preallocation=metadata",
        cluster: 4096,
        ..QCOW2
    },
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
    Case {
        name: "16k-extended",
        options: "cluster_size=16k,extended_l2=on",
        cluster: 16384,
        ..QCOW2
    },
    Case {
        name: "16k-extended-below",
        options: "cluster_size=16k,extended_l2=on",
        cluster: 16384,
        backing: Some(Backing::RAW),
        ..QCOW2
    },
    Case {
        name: "64k",
        ..QCOW2
    },
    Case {
        name: "2M",
        options: "cluster_size=2M",
        cluster: 2 << 20,
        ..QCOW2
    },
    Case {
        name: "data-file",
        options: "cluster_size=4k,data_file=data.raw",
        cluster: 4096,
        ..QCOW2
    },
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
        format: "qed",
        options: "cluster_size=4k,table_size=2",
        cluster: 4096,
        backing: Some(Backing::RAW),
        ..QCOW2
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
];
