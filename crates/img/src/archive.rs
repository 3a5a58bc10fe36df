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

/// Options for dividing a disk into stripes.
#[derive(Clone, Debug)]
pub struct StripeOptions {
    /// Size of a stripe in bytes; see [`fathom_archive::STRIPE_SIZES`].
    pub stripe_size: u32,
    /// Indexes of stripes, in the order in which a reader should fetch them first.
    pub profile: Vec<u32>,
    /// Replace an existing image or file of the same name.
    pub force: bool,
    /// Read the stripes that the archive has already, and replace damaged ones.
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
    /// Returns a manifest without hashes for a disk of this size. Reports invalid sizes and
    /// profiles before the disk is read.
    pub(crate) fn frame(&self, path: &Path, size: u64) -> Result<Manifest, Error> {
        let made = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let made = made.map_or(0, |made| made.as_secs());
        let count = size.div_ceil(u64::from(self.stripe_size.max(1)));
        // Bounds the vector's memory; the manifest rejects a disk with more stripes than allowed.
        let stripes = vec![None; count.min(1 << 26) as usize];
        Manifest::new(size, self.stripe_size, stripes, self.profile.clone(), made)
            .map_err(|problem| usage(path, problem))
    }
}

/// Result of archiving a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Archived {
    /// Address of the manifest.
    pub manifest: String,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Number of bytes that were read from the disk.
    pub read: u64,
    /// Number of stripes that were added.
    pub new: u32,
    /// Number of stripes that the archive had already.
    pub known: u32,
    /// Number of stripes among the `new` ones that replaced damaged copies.
    pub repaired: u32,
    /// Number of stripes that are all zeroes.
    pub zero: u32,
    /// Stored size in bytes of the added stripes.
    pub stored: u64,
}

/// Archives a disk's contents, as its guest sees them, under `name`. The archive is a directory or
/// `s3://BUCKET/PREFIX`.
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

/// Lists the images of an archive.
pub fn archived(archive: &str) -> Result<Vec<ListedImage>, Error> {
    let background = Background::<()>::new()?;
    Ok(background.run(fathom_archive::list(archive))?)
}

/// Returns the manifest with the hashes of all stripes.
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
