//! Replies to commands.

use fathom_control::RequestError;
use serde_json::Value;

/// An object in JSON, or why there is none.
pub type Answer = Result<Value, RequestError>;

/// Takes the reply to a command.
pub type Asker = Box<dyn FnOnce(Answer) + Send>;
