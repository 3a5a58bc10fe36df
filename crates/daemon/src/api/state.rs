//! Asking the daemon's thread.

use super::pages::Pages;
use super::problem::Problem;
use crate::answer::Answer;
use crate::command::{Ask, Command};
use crate::controller::{Controller, Step};
use crate::events::Events;
use crate::live::Listeners;
use crate::mailbox::Post;
use crate::metrics::Measures;
use serde_json::Value;
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

    /// Of a disk, or of the daemon.
    pub async fn ask(&self, disk: Option<&str>, command: Command) -> Result<Value, Problem> {
        self.try_to(disk, command).await?.map_err(Problem::from)
    }

    /// The same, for who goes by the reason of a refusal.
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
