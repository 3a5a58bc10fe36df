//! Images in every format that Fathom serves, created and checked by qemu-img.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fathom_lab::{Server, program};

use crate::{Place, run_command};

const SOON: Duration = Duration::from_secs(60);

/// Size in bytes of a backing file, smaller than any overlay here.
pub const BACKING_BYTES: u64 = 8 << 20;

/// The format of a disk's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    format: &'static str,
    /// Options for `qemu-img create -o`.
    options: &'static str,
    /// Format of the backing file, if there is one.
    backing: Option<&'static str>,
}

impl Kind {
    /// The file has the contents of the disk.
    pub const RAW: Self = Self::of("raw", "", None);
    /// The default of qemu-img: version 3, clusters of 64k.
    pub const QCOW2: Self = Self::of("qcow2", "", None);
    /// Each cluster has 32 subclusters, which are allocated separately.
    pub const QCOW2_SUBCLUSTERS: Self = Self::of("qcow2", "extended_l2=on", None);
    /// Nearly every write of 4k allocates.
    pub const QCOW2_SMALL: Self = Self::of("qcow2", "cluster_size=4k", None);
    /// With a raw backing file.
    pub const QCOW2_BACKED: Self = Self::of("qcow2", "", Some("raw"));
    /// The default of qemu-img.
    pub const QED: Self = Self::of("qed", "", None);
    /// Nearly every write of 4k allocates.
    pub const QED_SMALL: Self = Self::of("qed", "cluster_size=4k", None);
    /// With a qcow2 backing file.
    pub const QED_BACKED: Self = Self::of("qed", "", Some("qcow2"));

    const fn of(
        format: &'static str,
        options: &'static str,
        backing: Option<&'static str>,
    ) -> Self {
        Self {
            format,
            options,
            backing,
        }
    }

    /// Returns whether the disk begins with [`backing_bytes`].
    pub fn is_backed(self) -> bool {
        self.backing.is_some()
    }
}

/// Returns the contents of a backing file, no two sectors of which are equal.
pub fn backing_bytes() -> Vec<u8> {
    let words = 0..u32::try_from(BACKING_BYTES / 4).expect("it is small");
    words
        .flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes())
        .collect()
}

/// A disk in a file.
#[derive(Debug, Clone)]
pub struct Image {
    kind: Kind,
    path: PathBuf,
}

impl Image {
    /// Creates an empty image, or an empty overlay of a backing file next to it.
    ///
    /// # Panics
    /// With the output of qemu-img if the image cannot be created.
    pub fn create(path: PathBuf, kind: Kind, bytes: u64) -> Self {
        let image = Self { kind, path };
        let backing = kind
            .backing
            .map(|format| (image.make_backing(format), format));
        let backing = backing
            .as_ref()
            .map(|(path, format)| (path.as_path(), *format));
        image.create_over(backing, bytes);
        image
    }

    /// Returns an existing image.
    #[must_use]
    pub fn at(path: PathBuf, kind: Kind) -> Self {
        Self { kind, path }
    }

    /// Creates an image with the bytes of a raw one: a copy of them, or an overlay of it.
    ///
    /// # Panics
    /// With the output of qemu-img if the image cannot be created.
    pub fn with_bytes_of(path: PathBuf, kind: Kind, raw: &Path) -> Self {
        let image = Self { kind, path };
        if kind.is_backed() {
            let bytes = fs::metadata(raw).expect("a raw image").len();
            image.create_over(Some((raw, "raw")), bytes);
        } else {
            let args = ["convert", "-f", "raw", "-O", kind.format];
            qemu_img(&args, &[raw, &image.path]);
        }
        image
    }

    fn create_over(&self, backing: Option<(&Path, &str)>, bytes: u64) {
        let mut command = Command::new(program("qemu-img").expect("`make setup` installs it"));
        command.args(["create", "-q", "-f", self.kind.format]);
        if !self.kind.options.is_empty() {
            command.args(["-o", self.kind.options]);
        }
        if let Some((path, format)) = backing {
            // A relative name, so that any server in the same directory finds the file.
            let name = path.file_name().expect("a file");
            command.args(["-F", format, "-b"]).arg(name);
        }
        command.arg(&self.path).arg(bytes.to_string());
        let ended = run_command(command, SOON);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }

    fn make_backing(&self, format: &'static str) -> PathBuf {
        let raw = self.beside("base");
        fs::write(&raw, backing_bytes()).expect("a backing file");
        if format == "raw" {
            return raw;
        }
        let other = self.beside("base-image");
        qemu_img(&["convert", "-f", "raw", "-O", format], &[&raw, &other]);
        other
    }

    fn beside(&self, what: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{what}"));
        name.into()
    }

    /// Returns the path of the image's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the format's name in the configuration.
    pub fn format(&self) -> &'static str {
        self.kind.format
    }

    /// Serves the image.
    ///
    /// # Panics
    /// With the server's last log lines if it does not start.
    pub fn serve(&self, place: &Place, name: &str, args: &[&str]) -> Server {
        let format = match self.kind.format {
            "raw" => vec![],
            format => vec!["--format", format],
        };
        place.serve(name, &self.path, &[args, &format].concat())
    }

    /// Returns the number of bytes that the file system has allocated for the image.
    ///
    /// # Panics
    /// If the image does not exist.
    pub fn allocated(&self) -> u64 {
        fs::metadata(&self.path).expect("an image").blocks() * 512
    }

    /// Checks that qemu-img finds no errors and no leaked clusters in the image.
    ///
    /// A QED image may have leaked clusters, because the format cannot record that a cluster in the
    /// middle is free. With clusters of 4k, qemu-img also finds one leak in its own images.
    ///
    /// # Panics
    /// With the output of qemu-img if it finds any.
    pub fn check_clean(&self) {
        if self.kind.format == "qed" {
            return self.check_consistent();
        }
        self.check(&[0]);
    }

    /// Checks that qemu-img finds no errors but leaked clusters in the image. A server may have the
    /// image open.
    ///
    /// # Panics
    /// With the output of qemu-img if it finds other errors.
    pub fn check_consistent(&self) {
        // qemu-img(1): 3 is "leaked clusters, but is not corrupted".
        self.check(&[0, 3]);
    }

    fn check(&self, allowed: &[i32]) {
        if self.kind == Kind::RAW {
            return;
        }
        let mut command = Command::new(program("qemu-img").expect("`make setup` installs it"));
        command.args(["check", "-U", "-f", self.kind.format]);
        command.arg(&self.path);
        let ended = run_command(command, SOON);
        assert!(
            ended.code.is_some_and(|code| allowed.contains(&code)),
            "{}: {}{}",
            self.path.display(),
            ended.stdout,
            ended.stderr
        );
    }

    /// Checks that no program has locked the image, and that qemu-img finds no errors in it.
    ///
    /// # Panics
    /// With the output of qemu-io if the image is locked, or of qemu-img if it has errors.
    pub fn check_unused(&self) {
        let format = format!(
            "driver={},file.driver=file,file.locking=on",
            self.kind.format
        );
        let open = format!("{format},file.filename={}", self.path.display());
        let mut command = Command::new(program("qemu-io").expect("`make setup` installs it"));
        command.args(["--image-opts", &open, "-c", "length"]);
        let ended = run_command(command, SOON);
        assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
        self.check_clean();
    }

    /// Returns a raw file with the disk's bytes, as QEMU reads them.
    ///
    /// # Panics
    /// With the output of qemu-img if it cannot read the image.
    pub fn flat(&self) -> PathBuf {
        if self.kind == Kind::RAW {
            return self.path.clone();
        }
        let flat = self.beside("flat");
        let args = ["convert", "-f", self.kind.format, "-O", "raw"];
        qemu_img(&args, &[&self.path, &flat]);
        flat
    }

    /// Checks that QEMU reads the same bytes from the image as from a raw one.
    ///
    /// # Panics
    /// With the output of qemu-img if the bytes differ.
    pub fn expect_bytes_of(&self, raw: &Path) {
        let args = ["compare", "-f", self.kind.format, "-F", "raw"];
        qemu_img(&args, &[&self.path, raw]);
    }

    /// Writes the contents of a new image to a raw file: the backing file's bytes, then zeroes.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_first_bytes(&self, raw: &Path) {
        if self.kind.is_backed() {
            let file = OpenOptions::new().write(true).open(raw);
            file.and_then(|file| file.write_all_at(&backing_bytes(), 0))
                .expect("a raw image");
        }
    }
}

fn qemu_img(args: &[&str], paths: &[&Path]) {
    let paths = paths.iter().map(|path| path.to_string_lossy());
    let paths: Vec<_> = paths.collect();
    let args: Vec<&str> = args
        .iter()
        .copied()
        .chain(paths.iter().map(|p| &**p))
        .collect();
    fathom_lab::run("qemu-img", &args).unwrap_or_else(|error| panic!("{error}"));
}
