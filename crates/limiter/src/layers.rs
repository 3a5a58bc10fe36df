//! Names of the layers in evidence, for all that record it.

/// The part of a request's time outside of the server.
pub const OUTSIDE: &str = "guest, KVM and QEMU";
/// The storage below the server, as the server sees it.
pub const STORAGE: &str = "host: device";
/// The same for storage that is an NBD server.
pub const NBD: &str = "NBD server";
/// The lookups in the tables of an image.
pub const TABLES: &str = "fathom: map";
/// Begin of the names of a server's own stages.
const SERVER: &str = "fathom: ";
/// The stages of a request in the server, in their order.
pub const STAGES: [&str; 6] = ["wake", "queue", "map", "device", "finish", "notify"];

/// Returns the name of the layer of a stage of Fathom's.
pub fn of_stage(stage: &str) -> String {
    match stage {
        "device" => STORAGE.to_owned(),
        stage => format!("{SERVER}{stage}"),
    }
}

/// Returns true for the server's own layers and those below it.
pub(crate) fn is_in_server(layer: &str) -> bool {
    layer.starts_with(SERVER) || layer == STORAGE || layer == NBD
}
