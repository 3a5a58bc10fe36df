use super::*;

#[test]
fn disks_are_paths_or_sizes() {
    let parse = |text: &str| DiskSpec::parse(OsStr::new(text));
    assert_eq!(parse("memory:4G"), Ok(DiskSpec::Memory(4 << 30)));
    assert_eq!(parse("null:1T"), Ok(DiskSpec::Null(1 << 40)));
    for path in ["disk.img", "./null:1T", "a:b", "memory"] {
        assert_eq!(parse(path), Ok(DiskSpec::File(path.into())));
    }
    let uri = "nbd+unix:///disk?socket=/run/s";
    let parsed = uri.parse().map(DiskSpec::Nbd);
    assert_eq!(parse(uri), parsed);
    assert_eq!(parse(uri).map(|disk| disk.to_string()), Ok(uri.into()));
    for bad in ["nbd://[", "nbd+unix:///", "nbds://x"] {
        assert!(parse(bad).is_err(), "{bad}");
    }
    for bad in [
        "http://host/disk",
        "https://h/",
        "ftp://x",
        "memory:",
        "null:x",
        "null:0",
        "null:511",
        "null:15E",
    ] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn servers_are_given_time() {
    let parse = |text: &str| text.parse().map(|Timeout(time)| time);
    assert_eq!(parse("off"), Ok(None));
    assert_eq!(parse("1500ms"), Ok(Some(Duration::from_millis(1500))));
    for bad in ["", "0s", "5", "on", "-1s"] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn sockets_are_paths_or_descriptors() {
    let parse = |text: &str| SocketSpec::parse(OsStr::new(text));
    assert_eq!(parse("/run/x"), Ok(SocketSpec::Path("/run/x".into())));
    assert_eq!(parse("fd:3"), Ok(SocketSpec::Fd(3)));
    for bad in ["fd:", "fd:-1", "fd:x", "fd:99999999999"] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn cpus_are_listed_like_taskset() {
    let parse = |text: &str| text.parse().map(|CpuList(cpus)| cpus);
    assert_eq!(parse("3"), Ok(vec![3]));
    assert_eq!(parse("4-6,0,5"), Ok(vec![0, 4, 5, 6]));
    for bad in ["", ",", "1-", "3-1", "a", "-1", "1024", "0-99999999"] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn every_worker_gets_its_share_of_the_cpus() {
    let shares = |list: &str, n| {
        let list: CpuList = list.parse().unwrap();
        (0..n).map(|i| list.share(i, n)).collect::<Vec<_>>()
    };
    assert_eq!(shares("1-4", 2), [vec![1, 3], vec![2, 4]]);
    assert_eq!(shares("1-2", 3), [vec![1], vec![2], vec![1]]);
    assert_eq!(CpuList::default().share(1, 2), [0; 0]);
}

#[test]
fn formats_of_others_are_named_as_such() {
    assert_eq!(parse_format("raw"), Ok(Format::Raw));
    assert_eq!(parse_format("qcow2"), Ok(Format::Qcow2));
    let error = parse_format("vmdk").unwrap_err();
    assert!(error.contains("qemu-img convert"), "{error}");
    assert!(parse_format("ntfs").unwrap_err().contains("raw"));
}

#[test]
fn options_that_do_not_go_together_are_told() {
    let refusal = |disk: &str, change: &dyn Fn(&mut DiskOptions)| {
        let disk = DiskSpec::parse(OsStr::new(disk)).unwrap();
        let mut options = ServeOptions::new(disk, SocketSpec::Activated);
        change(&mut options.disks[0]);
        options.validate().err().unwrap_or_default()
    };
    let qcow2 = |options: &mut DiskOptions| options.format = Some(Format::Qcow2);
    assert_eq!(refusal("image", &|_| ()), "");
    assert_eq!(refusal("image", &qcow2), "");
    assert_ne!(refusal("null:1G", &qcow2), "");
    assert_ne!(refusal("null:1G", &|o| o.offset = Some(0)), "");
    assert_eq!(refusal("image", &|o| o.offset = Some(512)), "");
    assert_eq!(refusal("image", &|o| o.size = Some(512)), "");
    assert_ne!(refusal("image", &|o| o.offset = Some(1)), "");
    assert_ne!(refusal("image", &|o| o.size = Some(0)), "");
    let both = |options: &mut DiskOptions| {
        qcow2(options);
        options.size = Some(512);
    };
    assert_ne!(refusal("image", &both), "");
    let cache = |format, size| {
        refusal("image", &|o| {
            o.format = format;
            o.metadata_cache = Some(size);
        })
    };
    assert_ne!(cache(None, 1 << 20), "");
    assert_ne!(cache(Some(Format::Raw), 1 << 20), "");
    assert_ne!(cache(Some(Format::Qed), 0), "");
    assert_eq!(cache(Some(Format::Qed), 64 << 10), "");
    assert_ne!(refusal("image", &|o| o.allow_dirs = vec!["x".into()]), "");
    assert_ne!(refusal("image", &|o| o.data_file = Some("x".into())), "");
    let patient = |o: &mut DiskOptions| o.server_timeout = "5s".parse().ok();
    assert_ne!(refusal("image", &patient), "");
    assert_eq!(refusal("nbd://host", &patient), "");
    assert_ne!(refusal("nbd://host", &qcow2), "");
}

#[test]
fn every_disk_can_be_reached_and_told_from_others() {
    let disk = |name: &str| {
        let mut disk = DiskOptions::new(DiskSpec::Null(512));
        disk.name = name.into();
        disk.nbd = Some(ExportOptions::default());
        disk
    };
    let mut options = ServeOptions::of(disk("a"));
    assert!(options.validate().unwrap_err().contains("--vhost-user"));
    options.nbd = Some(NbdOptions::default());
    assert_eq!(options.validate(), Ok(()));
    options.disks.push(disk("b"));
    assert_eq!(options.validate(), Ok(()));
    options.disks[1].nbd = None;
    assert!(options.validate().unwrap_err().contains("disk 'b'"));
    options.disks[1] = disk("a");
    assert!(options.validate().unwrap_err().contains("two disks"));
}
