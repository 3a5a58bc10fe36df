//! Who may connect to a socket.

use crate::api::Groups;
use fathom_exports::Access;
use fathom_spec::{Group, Mode};

/// The options of a socket, of which each may be left out.
pub fn access(mode: Option<Mode>, group: Option<Group>) -> Access {
    Access {
        mode: mode.map(|mode| mode.0),
        group: group.map(|group| group.0),
    }
}

/// Those of the API.
pub fn groups(all: Option<Group>, read: Option<Group>) -> Groups {
    Groups {
        all: all.map(|group| group.0),
        read: read.map(|group| group.0),
    }
}
