//! Contents of API requests: their bodies, and orders about jobs, bitmaps and snapshots.

use fathom_formats::Format;
use fathom_spec::text;
use fathom_stack::{KeySource, parse_format};
use fathom_storage::Location;
use serde::{Deserialize, Deserializer, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// Options of a new backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct BackupOrder {
    /// Path of the Unix socket at which NBD clients read the backup [default: the path of the
    /// disk's vhost-user socket with `.backup` appended]
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// Directory of the scratch file, which keeps overwritten data until the backup ends [default:
    /// the directory of the image]
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub scratch: Option<PathBuf>,
    /// Maximum size of the scratch file in bytes, or such as "20G". If more data is overwritten
    /// during the backup, the backup fails [default: half of the space that is free when the backup
    /// begins]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub scratch_size: Option<u64>,
    /// Name of the dirty bitmap that NBD clients read as `qemu:dirty-bitmap:NAME`. A bitmap that
    /// does not exist is added, and begins with this backup. An existing bitmap advances to this
    /// backup only by a later request [default: no bitmap]
    #[serde(default)]
    pub bitmap: Option<String>,
    /// Stop changes of the disk until POST of `/v1/disks/{name}/backup/go`, so that backups of
    /// several disks begin at the same instant. If that request does not arrive within five
    /// seconds, the backup fails and the disk continues [default: false]
    #[serde(default)]
    pub held: bool,
}

/// Options of a new dirty bitmap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NewBitmap {
    /// Number of bytes that a bit covers, or such as "64k": a power of two from 512 to 2G [default:
    /// 64k, and more for very large disks]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub granularity: Option<u64>,
}

/// The backup to which a dirty bitmap advances.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Advance {
    /// `successor` of the backup, whose data must be durable [default: the last backup with the
    /// bitmap]
    #[serde(default)]
    pub to: Option<u64>,
}

/// Options of a new mirror, which copies a disk to a target while the disk is in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MirrorOrder {
    /// Image to copy to: a path, or the URI of an NBD export or an image on Ceph. The target must
    /// exist, have the size of the disk, and not be in use. The previous contents of the target are
    /// lost.
    #[serde(with = "text")]
    #[schema(value_type = String, examples("/srv/disk.qcow2", "nbd://host/disk"))]
    pub target: Location,
    /// Format of the target [default: raw]
    #[serde(
        default,
        deserialize_with = "format",
        serialize_with = "text::optional::serialize",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub format: Option<Format>,
    /// Maximum number of bytes copied per second, or such as "100M" [default: no limit]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub speed: Option<u64>,
    /// After the first complete copy, slow guests and clients down to the speed of the copying.
    /// Without this option, the mirror of a disk that changes faster than it can be copied never
    /// becomes ready [default: false]
    #[serde(default)]
    pub active: bool,
    /// Places of the keys that unlock the target, such as `file:/etc/fathom/vm1.key` [default: the
    /// keys of the disk]
    #[serde(default, with = "text::list", skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub keys: Vec<KeySource>,
}

fn format<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Format>, D::Error> {
    text::optional::parse(from, parse_format)
}

/// Options of a commit, which merges a disk's top image into one of its backing images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CommitOrder {
    /// Path of the backing image to write to: an image of the disk's backing chain. The request
    /// must name this image, so that no image is written only because another image names it.
    #[schema(value_type = String)]
    pub base: PathBuf,
    /// Maximum number of bytes copied per second, or such as "100M" [default: no limit]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub speed: Option<u64>,
    /// After the first complete copy, slow guests and clients down to the speed of the copying.
    /// Without this option, the commit of a disk that changes faster than it can be copied never
    /// becomes ready [default: false]
    #[serde(default)]
    pub active: bool,
    /// Allow the commit for a disk that the server's command line or configuration defines. At a
    /// restart of the server, the image there must be `base` if the commit is complete, and the
    /// disk's present image otherwise [default: false]
    #[serde(default)]
    pub unkept: bool,
}

/// Options of a stream. A stream copies data from backing images into the disk's top image, or with
/// `top` from images in the middle of the backing chain into the image `base`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StreamOrder {
    /// Path of the backing image after the stream. Without `top`: an image of the disk's backing
    /// chain, or any other image, from which all differing data is copied [default: no backing
    /// image]. With `top`: the image of the chain to write to, which is required.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub base: Option<PathBuf>,
    /// Format of a `base` that is not in the disk's backing chain [default: raw]
    #[serde(
        default,
        deserialize_with = "format",
        serialize_with = "text::optional::serialize",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub format: Option<Format>,
    /// Path of an image between the disk's top image and `base`. The data of that image, and of all
    /// images between it and `base`, is merged into `base`. The image above `top` then has `base`
    /// as its backing image [default: data is copied into the disk's top image]
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub top: Option<PathBuf>,
    /// Maximum number of bytes copied per second, or such as "100M" [default: no limit]
    #[serde(default, deserialize_with = "text::size")]
    #[schema(value_type = Option<String>)]
    pub speed: Option<u64>,
}

/// Options of an external snapshot, which adds an overlay to a disk's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SnapshotOrder {
    /// Path of the new qcow2 image, to which all later changes of the disk go. The file must not
    /// exist.
    #[schema(value_type = String)]
    pub overlay: PathBuf,
    /// Allow the snapshot for a disk that the server's command line or configuration defines.
    /// Before the server restarts, change the disk's image there to the overlay [default: false]
    #[serde(default)]
    pub unkept: bool,
    /// Allow the snapshot for a disk with dirty bitmaps. The bitmaps stay with the old image, and
    /// the next backup must be a full backup [default: false]
    #[serde(default)]
    pub leave_bitmaps: bool,
}

/// Options of the switch of a disk to the target of its mirror.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Completion {
    /// Allow the switch for a disk that the server's command line or configuration defines. Before
    /// the server restarts, change the disk's image there to the target [default: false]
    #[serde(default)]
    pub unkept: bool,
    /// Allow the switch for a disk with dirty bitmaps. The bitmaps stay with the old image, and the
    /// next backup must be a full backup [default: false]
    #[serde(default)]
    pub leave_bitmaps: bool,
}

/// New name of a dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewName {
    /// The new name: 1 to 64 letters, digits, `-`, `_` and `.`, not beginning with `.`.
    pub to: String,
}

/// The bitmaps to merge into a dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Merged {
    /// Names of other bitmaps of the disk, which remain unchanged.
    pub from: Vec<String>,
}

/// An order about a disk's bitmaps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BitmapOrder {
    /// Lists the bitmaps.
    List,
    /// Adds an empty bitmap.
    Add {
        /// Name of the new bitmap.
        bitmap: String,
        /// Number of bytes that a bit covers. `None`: the default for the size of the disk.
        granularity: Option<u64>,
    },
    /// Removes a bitmap.
    Remove {
        /// Name of the bitmap.
        bitmap: String,
    },
    /// Replaces a bitmap by its successor, which has only the changes since a backup began.
    Advance {
        /// Name of the bitmap.
        bitmap: String,
        /// Identifier of the successor, which belongs to one backup. `None`: any successor.
        to: Option<u64>,
    },
    /// Marks all blocks of a bitmap as clean.
    Clear {
        /// Name of the bitmap.
        bitmap: String,
    },
    /// Renames a bitmap.
    Rename {
        /// Present name of the bitmap.
        bitmap: String,
        /// New name of the bitmap.
        to: String,
    },
    /// Marks all blocks of a bitmap as dirty that are dirty in one of the other bitmaps.
    Merge {
        /// Name of the bitmap that is changed.
        bitmap: String,
        /// Names of the other bitmaps, which remain unchanged.
        from: Vec<String>,
    },
}

/// An order about a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobOrder {
    /// Limits the speed of the job.
    SetSpeed {
        /// Maximum number of bytes copied per second. `None`: no limit.
        limit: Option<u64>,
    },
    /// Ends the job.
    End {
        /// Whether to end a mirror that is not ready. Other jobs ignore this field.
        force: bool,
    },
}

/// An order about the internal snapshots of a disk's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotsOrder {
    /// Lists the snapshots.
    List,
    /// Takes a snapshot of the disk as it is now.
    Take {
        /// Name of the new snapshot.
        snapshot: String,
    },
    /// Deletes the snapshot with this name or ID.
    Delete {
        /// Name or ID of the snapshot.
        snapshot: String,
    },
}
