//! Modes and groups of sockets, as the server needs them.

use crate::api::Groups;
use fathom_sockets::Access;
use fathom_spec::{Group, Mode};

/// Returns the access to a socket. None: the default.
pub fn access(mode: Option<Mode>, group: Option<Group>) -> Access {
    Access {
        mode: mode.map(|mode| mode.0),
        group: group.map(|group| group.0),
    }
}

/// Returns the groups that may use the API, and that may only read.
pub fn groups(all: Option<Group>, read: Option<Group>) -> Groups {
    Groups {
        all: all.map(|group| group.0),
        read: read.map(|group| group.0),
    }
}
