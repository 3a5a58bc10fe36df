//! A file on a server, of which parts are read.

use crate::address::Address;
use crate::error::Error;
use crate::place::{Body, Place};
use crate::told::{Kind, NO_RANGES, status_of};
use bytes::Bytes;
use object_store::{Attribute, Attributes, GetOptions, GetRange, GetResult, ObjectMeta};

/// An object as it was when it was opened.
#[derive(Clone, Debug)]
pub struct Object {
    place: Place,
    name: String,
    meta: ObjectMeta,
    version: String,
}

impl Object {
    /// Opens what is at `address`: `s3://BUCKET/KEY`, `https://...`, `http://...`, or a path. Credentials
    /// for S3 come from the environment: `AWS_ACCESS_KEY_ID` and the like.
    pub async fn open(address: &str) -> Result<Object, Error> {
        let (place, name) = Place::of_object(&Address::parse(address)?)?;
        let meta = match place.kind() {
            Kind::Web => probe(&place, &name).await?,
            _ => head(&place, &name).await?,
        };
        let Some(version) = version_of(&meta) else {
            let problem = "its server sends neither a strong ETag nor Last-Modified, so changes of the \
                 object could not be noticed";
            return Err(Error::unusable(place.shown(&name), problem));
        };
        Ok(Object {
            place,
            name,
            meta,
            version,
        })
    }

    /// Its address, for people: without what may be a secret.
    pub fn shown(&self) -> String {
        self.place.shown(&self.name)
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.meta.size
    }

    /// What tells it from what may be there later: its strong ETag, or when it was changed.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// `len` bytes from `offset` on, which are all in the object. [`Error::Changed`] if it is not the same
    /// any more.
    pub async fn read(&self, offset: u64, len: usize) -> Result<Bytes, Error> {
        let end = offset.checked_add(len as u64);
        let Some(end) = end.filter(|end| *end <= self.size()) else {
            let problem = format!("{len} bytes at {offset} are beyond the object's end");
            return Err(Error::unusable(self.shown(), problem));
        };
        if len == 0 {
            return Ok(Bytes::new());
        }
        let got = self.place.get(&self.name, self.options(offset..end)).await;
        let got = got.map_err(|error| match status_of(&error.to_string()) {
            // There is no such part any more.
            Some(416) => Error::Changed { what: self.shown() },
            _ => self.place.told(&self.name, error),
        })?;
        self.check(&got)?;
        let mut body = Body::new(got);
        let read = body.read_to(len as u64).await;
        read.map_err(|error| self.place.told(&self.name, error))?;
        let what = self.shown();
        match body.bytes.len() {
            read if read == len => Ok(body.bytes.into()),
            read if read < len => Err(Error::Unreachable {
                what,
                problem: format!("received {read} of {len} bytes"),
            }),
            read => {
                let problem = format!("its server sent {read} bytes or more instead of {len}");
                Err(Error::unusable(what, problem))
            }
        }
    }

    /// Asks for nothing but the version that was opened.
    fn options(&self, range: std::ops::Range<u64>) -> GetOptions {
        let etag = strong_etag(&self.meta);
        GetOptions {
            if_unmodified_since: match etag {
                Some(_) => None,
                None => modified(&self.meta).then_some(self.meta.last_modified),
            },
            if_match: etag,
            range: Some(GetRange::Bounded(range)),
            ..GetOptions::default()
        }
    }

    /// Not all servers look at conditions.
    fn check(&self, got: &GetResult) -> Result<(), Error> {
        let is_same =
            got.meta.size == self.size() && version_of(&got.meta).as_ref() == Some(&self.version);
        if !is_same {
            return Err(Error::Changed { what: self.shown() });
        }
        refuse_encoding(&self.shown(), &got.attributes)
    }
}

async fn head(place: &Place, name: &str) -> Result<ObjectMeta, Error> {
    let options = GetOptions {
        head: true,
        ..GetOptions::default()
    };
    let got = place.get(name, options).await;
    Ok(got.map_err(|error| place.told(name, error))?.meta)
}

/// A part of it: that the server knows parts has to be known before it is used, and who may read may not
/// always ask for the head.
async fn probe(place: &Place, name: &str) -> Result<ObjectMeta, Error> {
    let options = GetOptions {
        range: Some(GetRange::Bounded(0..1)),
        ..GetOptions::default()
    };
    match place.get(name, options).await {
        Ok(got) => {
            refuse_encoding(&place.shown(name), &got.attributes)?;
            Ok(got.meta)
        }
        Err(error) if status_of(&error.to_string()) == Some(416) => {
            let meta = head(place, name).await?;
            match meta.size {
                0 => Ok(meta),
                _ => Err(Error::unusable(place.shown(name), NO_RANGES)),
            }
        }
        Err(error) => Err(place.told(name, error)),
    }
}

/// Bytes of something compressed are not those of the file.
fn refuse_encoding(what: &str, attributes: &Attributes) -> Result<(), Error> {
    let encoding = attributes
        .get(&Attribute::ContentEncoding)
        .map(AsRef::as_ref);
    match encoding {
        // What some clients of S3 leave behind.
        None | Some("" | "identity" | "aws-chunked") => Ok(()),
        Some(other) => {
            let problem = format!(
                "its server sends it compressed ({other}); configure the server to send it \
                 unchanged"
            );
            Err(Error::unusable(what, problem))
        }
    }
}

fn version_of(meta: &ObjectMeta) -> Option<String> {
    strong_etag(meta).or_else(|| modified(meta).then(|| meta.last_modified.to_rfc3339()))
}

/// Whether it is known when it was changed.
fn modified(meta: &ObjectMeta) -> bool {
    meta.last_modified.timestamp() != 0
}

/// The entity tag, if equal tags mean equal bytes. A weak one only says that one representation may stand
/// for the other (RFC 9110, section 8.8.1), and fits no condition on ranges.
fn strong_etag(meta: &ObjectMeta) -> Option<String> {
    let etag = meta.e_tag.clone();
    etag.filter(|etag| !etag.is_empty() && !etag.starts_with("W/"))
}
