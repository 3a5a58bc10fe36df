//! Exchanges images between QEMU and this crate.

use crate::support::Dir;
use fathom_luks::{Error, Header, Sectors};
use std::os::unix::fs::FileExt;

/// Runs qemu-io commands on the payload of "image".
fn qemu_io(dir: &Dir, commands: &[&str]) {
    let mut args = vec![
        "--object",
        "secret,id=s,file=key",
        "--image-opts",
        "driver=luks,key-secret=s,file.filename=image",
    ];
    for command in commands {
        args.extend(["-c", command]);
    }
    let output = dir.run("qemu-io", &args);
    assert!(!output.contains("Pattern verification failed"), "{output}");
}

#[test]
fn we_read_what_qemu_wrote() {
    for (bits, hash) in [
        ("aes-256", "sha256"),
        ("aes-128", "sha1"),
        ("aes-256", "sha512"),
    ] {
        let dir = Dir::new();
        let key = dir.key("key");
        let options = format!("key-secret=s,iter-time=10,cipher-alg={bits},hash-alg={hash}");
        let secret = [
            "create",
            "-f",
            "luks",
            "--object",
            "secret,id=s,file=key",
            "-o",
        ];
        dir.run(
            "qemu-img",
            &[&secret[..], &[&options, "image", "4M"]].concat(),
        );
        qemu_io(
            &dir,
            &[
                "write -P 1 0 64k",
                "write -P 2 1M 4k",
                "write -P 3 4193792 512",
            ],
        );

        let file = dir.open("image");
        let header = Header::read(&file).unwrap();
        let payload = header.payload();
        let sectors = Sectors::new(&header.unlock(&file, &key).unwrap(), payload.sector_size);
        for (at, len, pattern) in [(0, 65536, 1), (1 << 20, 4096, 2), (4_193_792, 512, 3)] {
            let mut area = vec![0; len];
            file.read_exact_at(&mut area, payload.offset + at).unwrap();
            sectors.decrypt(&mut area, at);
            assert!(area.iter().all(|&byte| byte == pattern), "{bits} {at}");
        }
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (option, named) in [
        ("cipher-alg=serpent-256", "serpent-xts-plain64"),
        ("cipher-mode=cbc", "aes-cbc-plain64"),
        ("hash-alg=ripemd160", "ripemd160"),
    ] {
        let dir = Dir::new();
        dir.key("key");
        let options = format!("key-secret=s,iter-time=10,{option}");
        let create = [
            "create",
            "-f",
            "luks",
            "--object",
            "secret,id=s,file=key",
            "-o",
        ];
        dir.run(
            "qemu-img",
            &[&create[..], &[&options, "image", "1M"]].concat(),
        );
        let error = Header::read(&dir.open("image")).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains(named) && text.contains("only"), "{text}");
    }
}

#[test]
fn qemu_reads_what_we_wrote() {
    let dir = Dir::new();
    dir.create("image", 1);
    let file = dir.open("image");
    let header = Header::read(&file).unwrap();
    let payload = header.payload();
    let key = header.unlock(&file, &dir.key("key")).unwrap();
    let sectors = Sectors::new(&key, payload.sector_size);
    for (at, len, pattern) in [(0, 65536, 7), (512 << 10, 512, 8)] {
        let mut area = vec![pattern; len];
        sectors.encrypt(&mut area, at);
        file.write_all_at(&area, payload.offset + at).unwrap();
    }
    qemu_io(&dir, &["read -P 7 0 64k", "read -P 8 512k 512"]);
    qemu_io(&dir, &["write -P 9 4k 4k"]);
    let mut area = vec![0; 4096];
    file.read_exact_at(&mut area, payload.offset + 4096)
        .unwrap();
    sectors.decrypt(&mut area, 4096);
    assert_eq!(area, [9; 4096]);
}
