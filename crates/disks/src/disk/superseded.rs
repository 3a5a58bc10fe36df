//! A disk's image, which a newer one may supersede. (The order of steps: `fathom_files::superseded`.)

use super::Served;
use fathom_stack::MarkedImage;

impl Served {
    /// The image that it is written to.
    pub fn marked(&self) -> MarkedImage {
        self.stack.marked.clone()
    }

    /// The image as users name it, by its absolute path if it is a file.
    pub fn location(&self) -> String {
        let location = &self.options.disk.location;
        let path = location
            .path()
            .and_then(|path| std::path::absolute(path).ok());
        path.map_or_else(|| location.to_string(), |path| path.display().to_string())
    }

    /// Why the image that it had before it was switched to this one is not marked.
    pub fn set_unmarked(&mut self, problem: Option<String>) {
        self.unmarked = problem;
    }
}
