//! Where an image comes from.

mod disk;

use crate::about::Origin;
use disk::RemoteDisk;
use fathom_storage::cached::Terms;

/// Why something does not come. One line each, without the image's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// It may come later.
    Away(String),
    /// It has no place here.
    Full,
    /// What has come is not what it should be; another time it may be.
    Wrong(String),
    /// It does not come.
    Never(String),
}

impl Problem {
    pub fn text(&self) -> &str {
        match self {
            Problem::Full => "there is no space left",
            Problem::Away(text) | Problem::Wrong(text) | Problem::Never(text) => text,
        }
    }
}

/// The unit that is fetched of images that do not say.
pub const STRIPE: u64 = 256 << 10;

/// An image that is open.
pub struct Remote {
    origin: Origin,
    way: Way,
}

enum Way {
    Disk(RemoteDisk),
}

impl Remote {
    pub async fn open(terms: &Terms) -> Result<Remote, Problem> {
        let disk = RemoteDisk::open(terms.remote.clone()).await?;
        let origin = Origin {
            size: disk.size(),
            stripe: STRIPE,
            version: String::new(),
        };
        Ok(Remote {
            origin,
            way: Way::Disk(disk),
        })
    }

    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// What boots read first, where it is known with the image.
    pub fn profile(&self) -> Vec<u32> {
        Vec::new()
    }

    /// A stripe's bytes, which are what they should be as far as can be told.
    pub async fn fetch(&self, stripe: u32) -> Result<Vec<u8>, Problem> {
        let at = u64::from(stripe) * self.origin.stripe;
        let len = self.origin.stripe.min(self.origin.size - at);
        match &self.way {
            Way::Disk(disk) => disk.read(at, len).await,
        }
    }
}
