//! Reads parts of a file on a server.

use crate::address::Address;
use crate::error::Error;
use crate::place::{Body, Place};
use crate::store_error::{Kind, NO_RANGES, status_of};
use bytes::Bytes;
use object_store::{Attribute, Attributes, GetOptions, GetRange, GetResult, ObjectMeta};

/// An object with the size and version that it had when it was opened.
#[derive(Clone, Debug)]
pub struct Object {
    place: Place,
    name: String,
    meta: ObjectMeta,
    version: String,
}

impl Object {
    /// Opens the object at `address`: `s3://BUCKET/KEY`, `https://...`, `http://...`, or a path.
    ///
    /// Credentials for S3 come from environment variables such as `AWS_ACCESS_KEY_ID`.
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

    /// Returns the address for people, without its query, which may contain a secret.
    pub fn shown(&self) -> String {
        self.place.shown(&self.name)
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.meta.size
    }

    /// Returns the version of the object: its strong ETag or, without one, the time of its last
    /// change.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Reads `len` bytes at `offset`. All of them must be inside the object.
    ///
    /// Returns [`Error::Changed`] if the object has changed since it was opened.
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
            // The range no longer exists, so the object has become shorter.
            Some(416) => Error::Changed { what: self.shown() },
            _ => self.place.store_error(&self.name, error),
        })?;
        self.check(&got)?;
        let mut body = Body::new(got);
        let read = body.read_to(len as u64).await;
        read.map_err(|error| self.place.store_error(&self.name, error))?;
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

    /// Returns the options of a request that succeeds only for the version that was opened.
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

    /// Checks the version in the response, because not all servers support conditional requests.
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
    Ok(got.map_err(|error| place.store_error(name, error))?.meta)
}

/// Requests one byte to check that the server supports ranges.
///
/// A HEAD request would not show that, and some users may read an object only with GET requests.
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
        Err(error) => Err(place.store_error(name, error)),
    }
}

/// Refuses compressed responses, whose bytes are not those of the file.
fn refuse_encoding(what: &str, attributes: &Attributes) -> Result<(), Error> {
    let encoding = attributes
        .get(&Attribute::ContentEncoding)
        .map(AsRef::as_ref);
    match encoding {
        // Some S3 clients store the encoding `aws-chunked` with an object.
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

/// Returns whether the time of the last change is known.
fn modified(meta: &ObjectMeta) -> bool {
    meta.last_modified.timestamp() != 0
}

/// Returns the entity tag if it is a strong one, for which equal tags mean equal bytes.
///
/// A weak tag says only that two representations are interchangeable (RFC 9110, section 8.8.1). A
/// weak tag cannot be used in a condition on a range.
fn strong_etag(meta: &ObjectMeta) -> Option<String> {
    let etag = meta.e_tag.clone();
    etag.filter(|etag| !etag.is_empty() && !etag.starts_with("W/"))
}
