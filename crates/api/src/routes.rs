//! All routes, and their description.

use crate::handle::ServerHandle;
use crate::problem::Problem;
use crate::{
    backup, bitmaps, described_problems, disks, groups, jobs, live, metrics, mirror, problem,
    server, snapshots, stream,
};
use axum::Router;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "fathom",
        description = "Controls a running `fathom serve`, over its Unix socket.",
        version = "1",
        license(name = "MIT OR Apache-2.0"),
        contact()
    ),
    components(schemas(Problem)),
    tags(
        (name = "disks", description = "Adds, changes and removes disks, and starts jobs on them, while other disks are served"),
        (name = "server", description = "Requests about the whole server")
    )
)]
struct Description;

/// Returns all routes, and their description.
pub fn routes() -> (Router<ServerHandle>, utoipa::openapi::OpenApi) {
    let (router, mut description) = OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(disks::list))
        .routes(routes!(disks::show, disks::put, disks::remove))
        .routes(routes!(disks::stats))
        .routes(routes!(disks::slow))
        .routes(routes!(disks::resize))
        .routes(routes!(disks::freeze))
        .routes(routes!(disks::thaw))
        .routes(routes!(disks::adopt))
        .routes(routes!(backup::begin, backup::end))
        .routes(routes!(backup::go))
        .routes(routes!(bitmaps::list))
        .routes(routes!(bitmaps::add, bitmaps::remove))
        .routes(routes!(bitmaps::advance))
        .routes(routes!(bitmaps::clear))
        .routes(routes!(bitmaps::rename))
        .routes(routes!(bitmaps::merge))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::take, snapshots::delete))
        .routes(routes!(mirror::begin, mirror::end))
        .routes(routes!(mirror::complete))
        .routes(routes!(mirror::commit))
        .routes(routes!(mirror::begin_stream, mirror::end_stream))
        .routes(routes!(mirror::snapshot))
        .routes(routes!(disks::set_filter))
        .routes(routes!(disks::start_trace, disks::stop_trace))
        .routes(routes!(jobs::list))
        .routes(routes!(jobs::show, jobs::change, jobs::end))
        .routes(routes!(groups::list))
        .routes(routes!(groups::set))
        .routes(routes!(server::show))
        .routes(routes!(server::quit))
        .routes(routes!(server::upgrade))
        .routes(routes!(stream::events))
        .routes(routes!(metrics::metrics))
        .routes(routes!(live::live))
        .routes(routes!(server::openapi))
        .split_for_parts();
    described_problems::describe(&mut description);
    (router, description)
}

/// Adds the replies to requests that no route handles, and the state.
pub fn router(routes: Router<ServerHandle>, server: ServerHandle) -> Router {
    routes
        .fallback(problem::no_such_place)
        .method_not_allowed_fallback(problem::no_such_method)
        .with_state(server)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// `FATHOM_BLESS=1` writes the file.
    #[test]
    fn description_in_the_documentation_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let (_, description) = routes();
        let text = format!("{}\n", description.to_pretty_json().unwrap());
        if std::env::var_os("FATHOM_BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(
            written == text,
            "docs/openapi.json is out of date: run the test with FATHOM_BLESS=1"
        );
    }
}
