//! Images on Ceph as a kind of storage.

use super::address::{Address, FORM, PREFIX};
use super::cluster::{Cluster, Settings};
use super::disk::RbdDisk;
use crate::kind::{Kind, OpenOptions, Opened, Place};
use fathom_core::DiskError;
use std::io;
use std::path::Path;
use std::sync::Arc;

pub(crate) const KIND: Kind = Kind {
    name: "rbd",
    form: FORM,
    what: "Image on Ceph (RBD)",
    prefixes: &[PREFIX],
    images: true,
    network: true,
    locks: true,
    options: &["server-timeout"],
    parse: |text| {
        let text = text.to_str().ok_or("a name on Ceph must be UTF-8")?;
        Ok(Arc::new(Address::parse(text)?))
    },
};

impl Address {
    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> DiskError {
        let path = self.to_string().into();
        move |source| DiskError::Io { path, what, source }
    }
}

impl Place for Address {
    fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError> {
        let disk = RbdDisk::open(self, options)?;
        Ok(Opened {
            bytes: Some(disk.bytes()),
            identity: Some(disk.identity()?),
            ..Opened::new(disk)
        })
    }

    fn create(&self) -> Result<bool, DiskError> {
        if self.snapshot.is_some() {
            return Err(DiskError::Unusable {
                path: self.to_string().into(),
                problem: "a snapshot, which only `rbd snap create` can make".into(),
            });
        }
        let cluster = Cluster::connect(self, &Settings::default())?;
        cluster
            .create(self)
            .map_err(self.failed("cannot create the image"))
    }

    fn remove(&self) -> Result<(), DiskError> {
        let cluster = Cluster::connect(self, &Settings::default())?;
        cluster
            .remove(self)
            .map_err(self.failed("cannot remove the image"))
    }

    /// The directory usually holds the keyring, too.
    fn settings_dir(&self) -> Option<&Path> {
        Path::new(self.conf.as_deref()?).parent()
    }

    /// Images may name other images only without options, and only in their own pool and namespace,
    /// because an untrusted party may have written the name. The other image is opened with the
    /// same options.
    fn beside(&self, name: &str) -> Option<Arc<dyn Place>> {
        let named = Address::parse(name).ok()?;
        let is_near = named.pool == self.pool && named.namespace == self.namespace;
        let says_more = named.conf.is_some() || named.user.is_some();
        let (conf, user) = (self.conf.clone(), self.user.clone());
        (is_near && !says_more).then(|| {
            Arc::new(Address {
                conf,
                user,
                ..named
            }) as _
        })
    }
}
