//! `fathom img archive`

use crate::background::Background;
use crate::error::{Error, usage};
use crate::progress::Progress;
use crate::source::Source;
use crate::stripes::{Keep, read};
use fathom_archive::{Manifest, Writer, check_name};
use fathom_stack::Job;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

pub use fathom_archive::{ListedImage, Summary};

/// How a disk is put into stripes.
#[derive(Clone, Debug)]
pub struct StripeOptions {
    /// Bytes of a stripe; see [`fathom_archive::STRIPE_SIZES`].
    pub stripe_size: u32,
    /// Numbers of stripes in the order in which they are wanted first.
    pub profile: Vec<u32>,
    /// What is there under that name already is replaced.
    pub force: bool,
    /// Stripes that are in the archive are read, and replaced if they are damaged.
    pub verify_known: bool,
}

impl Default for StripeOptions {
    fn default() -> StripeOptions {
        StripeOptions {
            stripe_size: 1 << 20,
            profile: Vec::new(),
            force: false,
            verify_known: false,
        }
    }
}

impl StripeOptions {
    /// A manifest of that disk that has no hashes yet: whether it is one is known before the disk is read.
    pub(crate) fn frame(&self, path: &Path, size: u64) -> Result<Manifest, Error> {
        let made = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let made = made.map_or(0, |made| made.as_secs());
        let count = size.div_ceil(u64::from(self.stripe_size.max(1)));
        // More than there may be are told by their number.
        let stripes = vec![None; count.min(1 << 26) as usize];
        Manifest::new(size, self.stripe_size, stripes, self.profile.clone(), made)
            .map_err(|problem| usage(path, problem))
    }
}

/// What an archive has got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Archived {
    /// The address of the manifest.
    pub manifest: String,
    /// Bytes of the disk, and how many were read.
    pub size: u64,
    pub read: u64,
    /// Stripes that were not there, that were, and that are all zeroes.
    pub new: u32,
    pub known: u32,
    /// Of the new ones, those that were there and damaged.
    pub repaired: u32,
    pub zero: u32,
    /// Bytes of the stripes that were not there, as they are stored.
    pub stored: u64,
}

/// Keeps what a disk's guest sees under `name` in an archive: a directory or `s3://BUCKET/PREFIX`.
pub fn archive(
    source: &Source,
    archive: &str,
    name: &str,
    options: &StripeOptions,
    progress: &mut Progress<'_>,
) -> Result<Archived, Error> {
    check_name(name).map_err(|problem| usage(Path::new(name), problem))?;
    let mut job = Job::default();
    let source = source.open(&mut job)?;
    let frame = options.frame(&source.path, source.size())?;
    let writer = Arc::new(Writer::open(archive)?.verifying(options.verify_known));
    let manifest = writer.manifest_address(name);
    let background = Background::new()?;
    if !options.force && background.run(writer.has_image(name))? {
        return Err(taken(&manifest));
    }
    let keep = Keep::Archive(writer.clone());
    let striped = read(&job, &source, &frame, keep, &background, progress)?;
    progress.check()?;
    let frame = with_hashes(&frame, striped.hashes);
    background
        .run(writer.finish(name, &frame, options.force))
        .map_err(|error| match error {
            fathom_archive::Error::Exists { .. } => taken(&manifest),
            error => error.into(),
        })?;
    Ok(Archived {
        manifest,
        size: frame.size(),
        read: striped.read,
        new: striped.new,
        known: striped.known,
        repaired: striped.repaired,
        zero: frame.stripes().iter().filter(|hash| hash.is_none()).count() as u32,
        stored: striped.stored,
    })
}

/// The images of an archive.
pub fn archived(archive: &str) -> Result<Vec<ListedImage>, Error> {
    let background = Background::<()>::new()?;
    Ok(background.run(fathom_archive::list(archive))?)
}

/// The manifest of a disk whose stripes are known by now.
pub(crate) fn with_hashes(frame: &Manifest, hashes: Vec<Option<fathom_archive::Hash>>) -> Manifest {
    let profile = frame.profile().to_vec();
    let manifest = Manifest::new(
        frame.size(),
        frame.stripe_size(),
        hashes,
        profile,
        frame.made(),
    );
    manifest.expect("the sizes were checked")
}

fn taken(manifest: &str) -> Error {
    let problem = "already exists; choose another name, or replace it with --force";
    usage(Path::new(manifest), problem)
}
