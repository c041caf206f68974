//! Lifecycle of a VM.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Lifecycle state of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Not started: the VM waits for boot.
    Created,
    /// Started; the guest has not executed its first instruction.
    #[default]
    Starting,
    /// The guest runs.
    Running,
    /// The guest is paused and can be resumed.
    Paused,
    /// The VM has exited.
    Ended,
}

impl fmt::Display for State {
    /// Writes the name that it has in JSON, padded as the caller wants.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Created => "created",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Ended => "ended",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_that_in_json() {
        use State::*;
        for state in [Created, Starting, Running, Paused, Ended] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.to_string());
        }
        assert_eq!(format!("{:<9}|", State::Ended), "ended    |");
    }
}
