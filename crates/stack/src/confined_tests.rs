use super::*;
use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, symlink};
use tempfile::TempDir;

/// A directory tree with files in and next to the image's directory.
///
/// The contents of each file are its name.
struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        for dir in ["in/sub", "out"] {
            fs::create_dir_all(place.path(dir)).unwrap();
        }
        for file in ["in/base", "in/sub/deep", "out/secret", "beside"] {
            fs::write(place.path(file), file).unwrap();
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn link(&self, target: impl AsRef<Path>, name: &str) {
        symlink(target, self.path(name)).unwrap();
    }

    fn dirs(&self, image: &str, more: &[&str]) -> AllowedDirs {
        let more: Vec<_> = more.iter().map(|dir| self.path(dir)).collect();
        AllowedDirs::new(&self.path(image), &more).unwrap()
    }

    /// Opens `name` as an image names it, with additional directories; returns its contents.
    fn named_by(&self, image: &str, more: &[&str], name: &str) -> Result<String, String> {
        let dirs = self.dirs(image, more);
        read_of(dirs.open(&self.path(image), name.as_bytes()))
    }

    fn named(&self, name: &str) -> Result<String, String> {
        self.named_by("in/image", &[], name)
    }

    fn absolute(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

fn read_of(opened: Result<(PathBuf, File), DiskError>) -> Result<String, String> {
    let (path, mut file) = opened.map_err(|error| error.to_string())?;
    let at_path = fs::metadata(&path).unwrap();
    assert_eq!(file.metadata().unwrap().ino(), at_path.ino(), "{path:?}");
    let mut contents = String::new();
    file.read_to_string(&mut contents).unwrap();
    Ok(contents)
}

fn says(outcome: Result<String, String>, words: &[&str]) {
    let error = outcome.expect_err("it was to be refused");
    assert_eq!(error.lines().count(), 1, "{error}");
    for word in words {
        assert!(error.contains(word), "no '{word}' in: {error}");
    }
}

#[test]
fn what_is_in_the_images_directory_is_opened() {
    let place = Place::new();
    for name in [
        "base",
        "./base",
        "sub/../base",
        "file:base",
        "sub//..//base",
    ] {
        assert_eq!(place.named(name).as_deref(), Ok("in/base"), "{name}");
    }
    assert_eq!(place.named("sub/deep").as_deref(), Ok("in/sub/deep"));
    let absolute = place.absolute("in/sub/deep");
    assert_eq!(place.named(&absolute).as_deref(), Ok("in/sub/deep"));
    // This name goes up and down again without leaving the directory.
    assert_eq!(place.named("../in/base").as_deref(), Ok("in/base"));
    says(
        place.named("missing"),
        &["in/image: ", "missing", "no such file"],
    );
}

#[test]
fn what_is_elsewhere_is_not() {
    let place = Place::new();
    for name in [
        "../beside",
        "../out/secret",
        "sub/../../beside",
        "sub/../../in/../beside",
        "../../../../../../../../etc/passwd",
        "/etc/passwd",
        "/../etc/passwd",
        &place.absolute("beside"),
        &place.absolute("in/../beside"),
        &place.absolute("in/sub/../../beside"),
        &place.absolute("inside"),
    ] {
        says(place.named(name), &["in/image: ", "--allow-dir"]);
    }
    for name in ["nbd:localhost:10809", "json:{}", ""] {
        assert!(place.named(name).is_err(), "{name}");
    }
}

#[test]
fn links_do_not_lead_out() {
    let place = Place::new();
    place.link("base", "in/near");
    place.link("sub", "in/way");
    place.link("near", "in/twice");
    for (name, contents) in [
        ("near", "in/base"),
        ("twice", "in/base"),
        ("way/deep", "in/sub/deep"),
        ("way/../base", "in/base"),
    ] {
        assert_eq!(place.named(name).as_deref(), Ok(contents), "{name}");
    }
    // The target of a link is resolved like a name in an image.
    place.link(place.path("in/base"), "in/absolute");
    assert_eq!(place.named("absolute").as_deref(), Ok("in/base"));

    place.link("../beside", "in/far");
    place.link(place.path("out/secret"), "in/farther");
    place.link("../out", "in/door");
    place.link("/", "in/root");
    place.link("door/secret", "in/through");
    let root = format!("root{}", place.absolute("out/secret"));
    for name in [
        "far",
        "farther",
        "door/secret",
        "through",
        "door/../beside",
        &root,
    ] {
        says(place.named(name), &["in/image: ", "--allow-dir"]);
    }
    place.link("loop", "in/loop");
    says(place.named("loop"), &["symbolic links"]);
    // Two links point at each other by absolute names, which the kernel does not follow here.
    place.link(place.path("in/pong"), "in/ping");
    place.link(place.path("in/ping"), "in/pong");
    says(place.named("ping"), &["symbolic links"]);
}

#[test]
fn more_directories_can_be_allowed() {
    let place = Place::new();
    place.link("out", "alias");
    place.link("../out/secret", "in/far");
    place.link("../out", "in/door");
    let absolute = place.absolute("out/secret");
    let by_alias = place.absolute("alias/secret");
    for (dir, name) in [
        ("out", "../out/secret"),
        ("out", "sub/../../out/secret"),
        ("out", &absolute),
        ("out", "far"),
        ("alias", "../out/secret"),
        ("alias", &by_alias),
        ("alias", &absolute),
        ("in/door", "door/secret"),
        (".", "../out/secret"),
        (".", "far"),
        (".", "door/secret"),
        ("out/../out", &absolute),
    ] {
        let opened = place.named_by("in/image", &[dir], name);
        if name == "sub/../../out/secret" {
            // The kernel resolves a `..` that follows a directory.
            says(opened, &["--allow-dir"]);
        } else {
            assert_eq!(opened.as_deref(), Ok("out/secret"), "{dir} {name}");
        }
    }
    says(
        place.named_by("in/image", &["out"], "../beside"),
        &["--allow-dir"],
    );
    // The advice in the error message works.
    for name in ["../out/secret", "far", "door/secret", &absolute, &by_alias] {
        let error = place.named(name).unwrap_err();
        let advice = error.split("--allow-dir ").nth(1).unwrap();
        let advice = advice.strip_suffix(" to allow it").unwrap();
        let opened = place.named_by("in/image", &[advice], name);
        assert_eq!(opened.as_deref(), Ok("out/secret"), "{name}: {advice}");
    }
    for missing in ["missing", "beside"] {
        let missing = place.path(missing);
        let error = AllowedDirs::new(&place.path("in/image"), &[missing]).unwrap_err();
        assert!(error.to_string().contains("--allow-dir"), "{error}");
    }
}

#[test]
fn names_in_a_chain_are_seen_from_their_own_image() {
    let place = Place::new();
    let dirs = place.dirs("in/image", &["out"]);
    let (path, _) = dirs.open(&place.path("in/image"), b"sub/deep").unwrap();
    let next = |path: &Path, name: &str| read_of(dirs.open(path, name.as_bytes()));
    assert_eq!(next(&path, "../base").as_deref(), Ok("in/base"));
    assert_eq!(next(&path, "../../out/secret").as_deref(), Ok("out/secret"));
    says(next(&path, "../../beside"), &["sub/deep: ", "--allow-dir"]);
    let (path, _) = dirs.open(&path, b"../../out/secret").unwrap();
    says(next(&path, "base"), &["out/secret: ", "no such file"]);
    assert_eq!(next(&path, "../in/base").as_deref(), Ok("in/base"));
}

#[test]
fn only_files_and_block_devices_are_opened() {
    let place = Place::new();
    let mode = Mode::RUSR | Mode::WUSR;
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, place.path("in/fifo"), fifo, mode, 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(place.path("in/socket")).unwrap();
    let dirs = place.dirs("in/image", &["."]);
    for name in ["fifo", "socket", "sub", ".", "sub/.."] {
        let opened = dirs.open(&place.path("in/image"), name.as_bytes());
        assert!(opened.is_err(), "{name}");
        // Opening the FIFO would wait for a writer.
        says(place.named(name), &["in/image: ", "not a regular file"]);
    }
    let devices = AllowedDirs::new(&place.path("in/image"), &["/dev".into()]).unwrap();
    let null = devices.open(&place.path("in/image"), b"/dev/null");
    says(read_of(null), &["not a regular file"]);
}

#[test]
fn the_links_of_proc_are_no_way_out() {
    let place = Place::new();
    let secret = File::open(place.path("out/secret")).unwrap();
    let by_fd = format!("/proc/self/fd/{}", secret.as_raw_fd());
    let by_cwd = "/proc/self/cwd/Cargo.toml";
    let image = place.path("in/image");
    let here = AllowedDirs::new(&image, &[]).unwrap();
    // The result is the same where all of /proc is allowed.
    let proc = AllowedDirs::new(&image, &["/proc".into()]).unwrap();
    place.link(&by_fd, "in/fd");
    for name in [&by_fd, by_cwd, "fd"] {
        for dirs in [&here, &proc] {
            assert!(dirs.open(&image, name.as_bytes()).is_err(), "{name}");
        }
    }
}

#[test]
fn a_file_is_opened_for_reading() {
    let place = Place::new();
    let dirs = place.dirs("in/image", &[]);
    let (_, reader) = dirs.open(&place.path("in/image"), b"base").unwrap();
    let flags = rustix::fs::fcntl_getfl(reader.as_fd()).unwrap();
    // io_uring would not wait for a file that is open with O_NONBLOCK.
    let expected = OFlags::LARGEFILE;
    assert_eq!(flags.difference(expected), OFlags::RDONLY);
}

#[test]
fn a_data_file_is_written_to_only_if_the_user_names_it() {
    let image = Path::new("/in/image");
    let given = Path::new("mine");
    assert_eq!(data_file(image, b"victim", Some(given)).unwrap(), given);
    let refused = |name: &[u8]| data_file(image, name, None).unwrap_err().to_string();
    let advice = |name| {
        refused(name)
            .split_once("--data-file ")
            .unwrap()
            .1
            .to_owned()
    };
    assert_eq!(advice(b"victim"), "/in/victim");
    assert_eq!(advice(b"file:/etc/passwd"), "/etc/passwd");
    assert_eq!(advice(b"a\x1b\n"), "/in/a\\u{1b}\\n");
}

#[test]
fn image_without_a_directory_is_in_the_current_one() {
    // The current directory of this test is the directory of this crate.
    let dirs = AllowedDirs::new(Path::new("image"), &[]).unwrap();
    let open = |name: &str| read_of(dirs.open(Path::new("image"), name.as_bytes()));
    assert!(open("Cargo.toml").unwrap().contains("fathom-stack"));
    assert!(open("src/confined.rs").is_ok());
    says(
        open("../cli/Cargo.toml"),
        &["image: ", "--allow-dir", "/cli"],
    );
    let dirs = AllowedDirs::new(Path::new("src/image"), &[]).unwrap();
    let outside = dirs.open(Path::new("src/image"), b"../Cargo.toml");
    says(read_of(outside), &["--allow-dir"]);
}

#[test]
fn an_image_in_the_root_directory_reaches_nothing() {
    let image = Path::new("/image");
    let name = b"etc/passwd";
    let dirs = AllowedDirs::new(image, &[]).unwrap();
    says(
        read_of(dirs.open(image, name)),
        &["/image: ", "--allow-dir /etc"],
    );
    let dirs = AllowedDirs::new(image, &["/".into()]).unwrap();
    assert!(read_of(dirs.open(image, name)).is_ok());
}

#[test]
fn names_cannot_play_with_the_terminal() {
    let place = Place::new();
    let error = place.named("a\x1b[2J\nb").unwrap_err();
    assert!(!error.contains('\x1b') && !error.contains('\n'), "{error}");
}
