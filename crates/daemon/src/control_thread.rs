//! Passes requests of the API on to the control thread.

use crate::controller::{Controller, Step};
use fathom_api::Server;
use fathom_host::mailbox::Post;
use fathom_metrics::Measures;
use fathom_requests::{Request, Responder};

/// The control thread, for other threads.
pub struct ControlThread(pub Post<Step>);

impl Server for ControlThread {
    fn request(&self, request: Request, responder: Responder) {
        let step = |controller: &mut Controller| controller.handle(request, responder);
        self.0.send(Box::new(step));
    }

    fn measure(&self, responder: Box<dyn FnOnce(Measures) + Send>) {
        let step = |controller: &mut Controller| controller.host_mut().measure_all(responder);
        self.0.send(Box::new(step));
    }
}
