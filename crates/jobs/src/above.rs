//! Finds the data of upper images that must be copied into an image below them.

use fathom_core::Changes;
use fathom_formats::served::Mapper;
use fathom_units::cause;

/// Bytes of the disk looked up in the image tables per call.
const MAPPED: usize = 16 << 30;

/// Number of extents between two checks for cancellation.
const LOOK: usize = 1024;

/// Marks in `todo` every range that the first `layers` images of `mapper` hold themselves.
///
/// The images keep that data. Returns false if `stops` returned true before all data was found.
/// The error is a message for the user.
pub(crate) fn mark(
    mapper: &mut Mapper,
    layers: usize,
    stops: &dyn Fn() -> bool,
    todo: &Changes,
) -> Result<bool, String> {
    for from in (0..todo.size()).step_by(MAPPED) {
        let to = todo.size().min(from + MAPPED as u64);
        for (n, extent) in mapper.extents(from..to, layers).enumerate() {
            if n % LOOK == 0 && stops() {
                return Ok(false);
            }
            let extent =
                extent.map_err(|error| format!("cannot read the disk: {}", cause(error)))?;
            // Beyond the end of a short image the disk reads as zeroes, even if the images below
            // hold data there.
            if !extent.is_below() {
                todo.mark(extent.start, extent.len);
            }
        }
    }
    Ok(true)
}
