//! Makes disks persistent.

use super::Controller;
use crate::files::{Reread, reread};
use fathom_control::{ErrorKind, Owner, Request as Change};
use fathom_requests::Responder;
use fathom_units::cause;

impl Controller {
    /// Stores the definition of a disk, unless the configuration still defines the disk.
    pub(super) fn adopt(&mut self, name: String, responder: Responder) {
        let is_static = self.registry.owner_of(&name) == Some(Owner::Static);
        let Some(config) = self.config.clone().filter(|_| is_static) else {
            let defined_at = is_static.then(|| "on the server's command line".to_owned());
            return self.request(name, Change::Adopt { defined_at }, responder);
        };
        let done = self.later(|controller, Reread { options, .. }: Reread| {
            let options = match options {
                Ok(options) => options,
                Err(error) => return responder(Err(ErrorKind::Failed.because(error.to_string()))),
            };
            let entry = options.disks.into_iter().find(|disk| disk.name == name);
            let defined_at = entry.map(|disk| match disk.defined_at {
                Some(place) => format!("in {place}"),
                None => "in the configuration".to_owned(),
            });
            controller.request(name, Change::Adopt { defined_at }, responder);
        });
        // (Without a reply, the request times out.)
        if let Err(error) = reread(config, None, done) {
            tracing::error!(
                "cannot start a thread to read the configuration: {}",
                cause(error)
            );
        }
    }
}
