//! Asking the daemon's thread.

use super::pages::Pages;
use super::problem::Problem;
use crate::command::{Ask, Command};
use crate::controller::{Controller, Step};
use crate::events::Events;
use crate::live::Listeners;
use crate::mailbox::Post;
use crate::metrics::Measures;
use crate::reply::{Answer, Reply};
use fathom_control::RequestError;
use std::sync::Arc;
use tokio::sync::oneshot;
use utoipa::openapi::OpenApi;

/// What every request has at hand.
#[derive(Clone)]
pub struct Asking {
    post: Arc<Post<Step>>,
    description: Arc<OpenApi>,
    events: Events,
    pages: Pages,
    /// Those who look at what goes on.
    listeners: Listeners,
}

impl Asking {
    pub fn new(post: Post<Step>, description: OpenApi, events: Events, pages: Pages) -> Asking {
        Asking {
            post: Arc::new(post),
            description: Arc::new(description),
            events,
            pages,
            listeners: Listeners::default(),
        }
    }

    pub fn description(&self) -> &OpenApi {
        &self.description
    }

    pub fn events(&self) -> &Events {
        &self.events
    }

    /// How metrics are told.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    pub fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Sends a request about a disk, or about the server. `T`: the content of its reply.
    pub async fn ask<T>(&self, disk: Option<&str>, command: Command) -> Result<T, Problem>
    where
        T: TryFrom<Reply, Error = RequestError>,
    {
        let answer = self.try_to(disk, command).await?;
        Ok(answer.and_then(T::try_from)?)
    }

    /// The same, for a caller that needs the kind of an error.
    pub async fn try_to(&self, disk: Option<&str>, command: Command) -> Result<Answer, Problem> {
        let ask = Ask {
            disk: disk.map(str::to_owned),
            command,
        };
        self.hear(|controller, asker| controller.handle(ask, asker))
            .await
    }

    /// All disks.
    pub async fn measure(&self) -> Result<Measures, Problem> {
        self.hear(|controller, asker| controller.host_mut().measure_all(asker))
            .await
    }

    /// What comes of it.
    async fn hear<T: Send + 'static>(
        &self,
        step: impl FnOnce(&mut Controller, Box<dyn FnOnce(T) + Send>) + Send + 'static,
    ) -> Result<T, Problem> {
        let (send, answer) = oneshot::channel();
        // It may be gone.
        let asker = Box::new(|answer| drop(send.send(answer)));
        self.post
            .send(Box::new(|controller| step(controller, asker)));
        answer.await.map_err(|_| Problem::ending())
    }
}
