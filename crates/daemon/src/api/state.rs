//! Sends requests to the control thread.

use super::pages::Pages;
use super::problem::Problem;
use crate::controller::{Controller, Step};
use crate::mailbox::Post;
use fathom_control::RequestError;
use fathom_metrics::Events;
use fathom_metrics::Listeners;
use fathom_metrics::Measures;
use fathom_requests::{Answer, Command, Disk, Reply, Request};
use std::sync::Arc;
use tokio::sync::oneshot;
use utoipa::openapi::OpenApi;

/// State of the API's routes.
#[derive(Clone)]
pub struct ServerHandle {
    post: Arc<Post<Step>>,
    description: Arc<OpenApi>,
    events: Events,
    pages: Pages,
    /// Clients of `/v1/live`.
    listeners: Listeners,
}

impl ServerHandle {
    pub fn new(
        post: Post<Step>,
        description: OpenApi,
        events: Events,
        pages: Pages,
    ) -> ServerHandle {
        ServerHandle {
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

    /// Makes pages of metrics.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    pub fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Sends a request. `T`: the content of its reply.
    pub async fn ask<T>(&self, request: Request) -> Result<T, Problem>
    where
        T: TryFrom<Reply, Error = RequestError>,
    {
        let answer = self.answer(request).await?;
        Ok(answer.and_then(T::try_from)?)
    }

    /// Sends a command to the host of a disk.
    pub async fn ask_host<T>(&self, disk: &str, command: Command) -> Result<T, Problem>
    where
        T: TryFrom<Reply, Error = RequestError>,
    {
        let disk = disk.to_owned();
        self.ask(Request::Host { disk, command }).await
    }

    /// Changes what a disk is.
    pub async fn change<T>(&self, disk: &str, change: fathom_control::Request) -> Result<T, Problem>
    where
        T: TryFrom<Reply, Error = RequestError>,
    {
        let disk = disk.to_owned();
        self.ask(Request::Change { disk, change }).await
    }

    /// Shows a disk.
    pub async fn show(&self, disk: &str) -> Result<Disk, Problem> {
        let disk = disk.to_owned();
        self.ask(Request::Show { disk }).await
    }

    /// Sends a request. An error of the request itself is in the answer.
    pub async fn answer(&self, request: Request) -> Result<Answer, Problem> {
        self.hear(|controller, responder| controller.handle(request, responder))
            .await
    }

    /// Returns the measurements of all disks.
    pub async fn measure(&self) -> Result<Measures, Problem> {
        self.hear(|controller, responder| controller.host_mut().measure_all(responder))
            .await
    }

    /// Runs a step on the control thread, and returns its result.
    async fn hear<T: Send + 'static>(
        &self,
        step: impl FnOnce(&mut Controller, Box<dyn FnOnce(T) + Send>) + Send + 'static,
    ) -> Result<T, Problem> {
        let (send, answer) = oneshot::channel();
        // (The client may have disconnected.)
        let responder = Box::new(|answer| drop(send.send(answer)));
        self.post
            .send(Box::new(|controller| step(controller, responder)));
        answer.await.map_err(|_| Problem::ending())
    }
}
