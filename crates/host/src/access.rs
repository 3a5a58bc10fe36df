//! Access to sockets, from options.

use fathom_sockets::Access;
use fathom_spec::{Group, Mode};

/// Returns the access to a socket. None: the default.
pub fn access(mode: Option<Mode>, group: Option<Group>) -> Access {
    Access {
        mode: mode.map(|mode| mode.0),
        group: group.map(|group| group.0),
    }
}
