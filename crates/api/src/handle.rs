//! Sends requests to the server.

use crate::pages::Pages;
use crate::problem::Problem;
use fathom_control::RequestError;
use fathom_metrics::Events;
use fathom_metrics::Listeners;
use fathom_metrics::Measures;
use fathom_requests::{Answer, Command, Disk, Reply, Request, Responder};
use std::sync::Arc;
use tokio::sync::oneshot;
use utoipa::openapi::OpenApi;

/// The server whose API this is. Methods return at once; the reply comes later, from another
/// thread.
pub trait Server: Send + Sync {
    /// Sends a request to the server, which calls `responder` once with the reply.
    fn request(&self, request: Request, responder: Responder);

    /// Measures all disks.
    fn measure(&self, responder: Box<dyn FnOnce(Measures) + Send>);
}

/// State of the API's routes.
#[derive(Clone)]
pub struct ServerHandle {
    server: Arc<dyn Server>,
    description: Arc<OpenApi>,
    events: Events,
    pages: Pages,
    /// Clients of `/v1/live`.
    listeners: Listeners,
}

impl ServerHandle {
    pub fn new(
        server: Arc<dyn Server>,
        description: OpenApi,
        events: Events,
        pages: Pages,
    ) -> ServerHandle {
        ServerHandle {
            server,
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
        let (send, answer) = oneshot::channel();
        // (The client may have disconnected.)
        self.server
            .request(request, Box::new(|answer| drop(send.send(answer))));
        answer.await.map_err(|_| Problem::ending())
    }

    /// Returns the measurements of all disks.
    pub async fn measure(&self) -> Result<Measures, Problem> {
        let (send, measures) = oneshot::channel();
        self.server
            .measure(Box::new(|measures| drop(send.send(measures))));
        measures.await.map_err(|_| Problem::ending())
    }
}
