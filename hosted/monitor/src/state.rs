//! Lifecycle of a VM.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Lifecycle state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Not started: the VM waits for boot.
    Created,
    /// Started; the guest has not executed its first instruction.
    Starting,
    /// The guest runs.
    Running,
    /// The guest is paused and can be resumed.
    Paused,
    /// The VM has exited.
    Ended,
}
