//! Images on web servers and in S3, either plain or in an archive.

use crate::problem::Problem;
use fathom_archive::{Error, Image, Object};

/// Returns whether `remote` is an address of a web server or of S3.
pub fn is_for(remote: &str) -> bool {
    ["s3://", "https://", "http://"]
        .iter()
        .any(|scheme| remote.starts_with(scheme))
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        let text = error.to_string();
        match error {
            Error::Corrupt { .. } => Problem::Wrong(text),
            Error::Changed { .. } | Error::Unusable { .. } => Problem::Never(text),
            // An administrator may be able to fix the problem, so disks keep retrying.
            _ => Problem::Away(text),
        }
    }
}

pub async fn open_archive(remote: &str) -> Result<Image, Problem> {
    Ok(Image::open(remote).await?)
}

pub async fn open_object(remote: &str) -> Result<Object, Problem> {
    Ok(Object::open(remote).await?)
}

pub async fn read(object: &Object, at: u64, len: u64) -> Result<Vec<u8>, Problem> {
    Ok(object.read(at, len as usize).await?.into())
}

pub async fn stripe(image: &Image, stripe: u32) -> Result<Vec<u8>, Problem> {
    Ok(image.stripe(stripe).await?)
}
