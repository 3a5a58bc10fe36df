//! Archives in directories: writing, reading, and damage.

use crate::run;
use crate::server::{Server, answer};
use fathom_archive::{Error, Image, Manifest, Put, Writer, encode, list};
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

const STRIPE: u32 = 64 << 10;

/// Returns stripes of text, random bytes, zeroes, the same text again, and a short one.
fn disk() -> Vec<Vec<u8>> {
    let mut state = 7_u64;
    let random = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    });
    let text = b"some text. ".repeat(6000)[..STRIPE as usize].to_vec();
    let random = random.take(STRIPE as usize).collect();
    let zeroes = vec![0; STRIPE as usize];
    vec![text.clone(), random, zeroes, text, b"the end".to_vec()]
}

type Change = fn(&Place, &Path);

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

async fn put_all(writer: &Writer) -> Result<(Manifest, Vec<Put>), Error> {
    let (mut hashes, mut puts) = (Vec::new(), Vec::new());
    let mut size = 0;
    for stripe in disk() {
        size += stripe.len() as u64;
        if is_zero(&stripe) {
            hashes.push(None);
            continue;
        }
        let (put, back) = writer.put(stripe.clone()).await;
        let put = put?;
        assert_eq!(back, stripe);
        hashes.push(Some(put.hash));
        puts.push(put);
    }
    let manifest = Manifest::new(size, STRIPE, hashes, vec![4, 0], 1_700_000_000);
    Ok((manifest.expect("it fits"), puts))
}

struct Place {
    dir: TempDir,
    archive: String,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let archive = dir.path().join("new/archive").to_str().unwrap().to_owned();
        Place { dir, archive }
    }

    fn with_image() -> Place {
        let place = Place::new();
        run(async {
            let writer = Writer::open(&place.archive).unwrap();
            let (manifest, _) = put_all(&writer).await.unwrap();
            writer.finish("image", &manifest, false).await.unwrap();
        });
        place
    }

    fn manifest(&self) -> String {
        format!("{}/images/image.manifest", self.archive)
    }

    fn stripe(&self, bytes: &[u8]) -> PathBuf {
        Path::new(&self.archive).join(encode(bytes).hash.object())
    }

    fn files(&self) -> Vec<PathBuf> {
        let (mut found, mut dirs) = (Vec::new(), vec![self.dir.path().to_owned()]);
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir)
                .unwrap()
                .map(|entry| entry.unwrap().path())
            {
                match entry.is_dir() {
                    true => dirs.push(entry),
                    false => found.push(entry),
                }
            }
        }
        found
    }
}

async fn read_all(manifest: &str) -> Result<Vec<Vec<u8>>, Error> {
    let image = Image::open(manifest).await?;
    let mut stripes = Vec::new();
    for index in 0..image.manifest().stripes().len() as u32 {
        stripes.push(image.stripe(index).await?);
        assert!(image.manifest().verify(index, stripes.last().unwrap()));
    }
    Ok(stripes)
}

#[test]
fn what_was_put_is_read() {
    let place = Place::with_image();
    assert_eq!(run(read_all(&place.manifest())).unwrap(), disk());
    // The text is stored once, and zeroes are not stored.
    assert_eq!(place.files().len(), 3 + 1);
    let listed = run(list(&place.archive)).unwrap();
    let [image] = &listed[..] else {
        panic!("{listed:?}");
    };
    let summary = image.summary.as_ref().unwrap();
    assert_eq!(
        (&*image.name, summary.stripes, summary.data),
        ("image", 5, 4)
    );
    assert_eq!(
        (summary.size, summary.made),
        (4 * 65_536 + 7, 1_700_000_000)
    );
}

#[test]
fn what_is_there_is_not_put_again() {
    let place = Place::with_image();
    run(async {
        let writer = Writer::open(&place.archive).unwrap();
        let (manifest, puts) = put_all(&writer).await.unwrap();
        assert!(puts.iter().all(|put| put.stored.is_none()), "{puts:?}");
        assert!(writer.has_image("image").await.unwrap());
        assert!(!writer.has_image("other").await.unwrap());
        let error = writer.finish("image", &manifest, false).await.unwrap_err();
        assert!(matches!(error, Error::Exists { .. }), "{error}");
        writer.finish("image", &manifest, true).await.unwrap();
        // A stripe with an implausible size is replaced.
        fs::write(place.stripe(b"the end"), b"").unwrap();
        let writer = Writer::open(&place.archive).unwrap();
        let (_, puts) = put_all(&writer).await.unwrap();
        assert_eq!(puts.iter().filter_map(|put| put.stored).count(), 1);
    });
    assert_eq!(run(read_all(&place.manifest())).unwrap(), disk());
}

#[test]
fn a_stripe_that_is_another_is_not_used() {
    let text = &disk()[0];
    let changes: [(Change, &str); 6] = [
        (|_, path| fs::remove_file(path).unwrap(), "lost"),
        (|_, path| fs::write(path, []).unwrap(), "truncated"),
        (
            |_, path| {
                let mut bytes = fs::read(path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(path, bytes).unwrap();
            },
            "stripes/",
        ),
        (
            |place, path| fs::write(path, fs::read(place.stripe(&disk()[1])).unwrap()).unwrap(),
            "the data does not match the name",
        ),
        (
            |_, path| fs::write(path, encode(&vec![0; 32 << 20]).object).unwrap(),
            "65536 are expected",
        ),
        (
            |_, path| fs::write(path, vec![1; 1 << 20]).unwrap(),
            "more than 65552",
        ),
    ];
    for (change, word) in changes {
        let place = Place::with_image();
        change(&place, &place.stripe(text));
        let error = run(read_all(&place.manifest())).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains(word), "{word}: {error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

#[test]
fn a_manifest_that_is_another_is_not_used() {
    let place = Place::with_image();
    let bytes = fs::read(place.manifest()).unwrap();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x20;
        fs::write(place.manifest(), changed).unwrap();
        let error = run(Image::open(&place.manifest())).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "byte {at}: {error}");
    }
    fs::write(place.manifest(), [&bytes[..], b"more"].concat()).unwrap();
    run(Image::open(&place.manifest())).unwrap_err();
    let listed = run(list(&place.archive)).unwrap();
    assert!(listed[0].summary.is_err());
}

/// An archive can be read from a web server.
#[test]
fn an_archive_is_read_from_a_web_server() {
    let place = Place::with_image();
    let root = place.archive.clone();
    let server = Server::start(move |asked| {
        match fs::read(format!(
            "{root}{}",
            asked.target.strip_prefix("/a/b").unwrap()
        )) {
            Ok(bytes) => answer("200 OK", &[], &bytes),
            Err(_) => answer("404 Not Found", &[], b""),
        }
    });
    let manifest = format!("{}/a/b/images/image.manifest", server.url);
    assert_eq!(run(read_all(&manifest)).unwrap(), disk());
    // The reader requests the manifest once, and each of the four stripes with data once.
    assert_eq!(server.asked(), 1 + 4);
    let other = format!("{}/a/b/images/other.manifest", server.url);
    let error = run(Image::open(&other)).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    fs::remove_file(place.stripe(b"the end")).unwrap();
    let error = run(read_all(&manifest)).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    run(async { Writer::open(&format!("{}/a", server.url)) }).unwrap_err();
    run(list(&server.url)).unwrap_err();
}

#[test]
fn an_archive_that_is_not_there_is_not_made_by_looking() {
    let place = Place::new();
    for error in [
        run(list(&place.archive)).map(drop).unwrap_err(),
        run(Image::open(&place.manifest())).map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, Error::NotFound { .. }), "{error}");
    }
    assert!(place.files().is_empty());
}
