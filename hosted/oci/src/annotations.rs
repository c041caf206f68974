//! Annotations of containers for their VMs.

use crate::refuse;
use hosted_command::failure::Failure;
use hosted_command::value::Size;
use hosted_exec::patience::AgentTimeout;
use std::collections::HashMap;

/// Annotations for VMs.
const PREFIX: &str = "dev.parador.";
/// Memory beyond the container's limit.
pub const EXTRA: &str = "dev.parador.memory";
/// Memory without a limit.
pub const DEFAULT: &str = "dev.parador.default_memory";
/// Time limit for the first answer of the agent.
pub const AGENT_TIMEOUT: &str = "dev.parador.agent_timeout";
/// Scratch disk for changes of the root directory: its size, or [`SCRATCH_ON`].
pub const SCRATCH: &str = "dev.parador.scratch";
const SCRATCH_ON: &str = "on";
/// Size of a scratch disk without a stated one.
const SCRATCH_SIZE: Size = Size(8 << 30);
/// Least size of a scratch disk.
const LEAST_SCRATCH: Size = Size(16 << 20);
/// Memory of a VM whose containers have no limit, unless it is stated.
const DEFAULT_MEMORY: Size = Size(2 << 30);
/// Least memory of a VM, and what a guest needs besides its containers.
pub const LEAST: Size = Size(64 << 20);

/// Checks that all annotations for VMs are known.
///
/// # Errors
/// One is not.
pub fn check_names(annotations: &HashMap<String, String>) -> Result<(), Failure> {
    const OWN: [&str; 4] = [EXTRA, DEFAULT, SCRATCH, AGENT_TIMEOUT];
    let is_unknown = |name: &str| name.starts_with(PREFIX) && !OWN.contains(&name);
    match annotations.keys().find(|name| is_unknown(name)) {
        Some(name) => Err(refuse(format!("unknown annotation {name}"))),
        None => Ok(()),
    }
}

/// Returns the memory of a guest besides its containers.
///
/// # Errors
/// The annotation is malformed.
pub fn extra(annotations: &HashMap<String, String>) -> Result<Size, Failure> {
    annotations.get(EXTRA).map_or(Ok(LEAST), |text| parse_size(EXTRA, text))
}

/// Returns the time limit for the first answer of the agent.
///
/// # Errors
/// The annotation is malformed.
pub fn agent_timeout(annotations: &HashMap<String, String>) -> Result<AgentTimeout, Failure> {
    let Some(text) = annotations.get(AGENT_TIMEOUT) else { return Ok(AgentTimeout::default()) };
    AgentTimeout::parse(text)
        .map_err(|error| refuse(format!("annotation {AGENT_TIMEOUT}: {error}")))
}

/// Returns the memory of a VM whose containers have no limit.
///
/// # Errors
/// The annotation is malformed.
pub fn default_memory(annotations: &HashMap<String, String>) -> Result<Size, Failure> {
    annotations.get(DEFAULT).map_or(Ok(DEFAULT_MEMORY), |text| parse_size(DEFAULT, text))
}

/// Reads an annotation with a size.
fn parse_size(name: &str, text: &str) -> Result<Size, Failure> {
    Size::parse(text).map_err(|error| refuse(format!("annotation {name}: {error}")))
}

/// Returns the size of the scratch disk.
///
/// # Errors
/// The annotation is malformed.
pub fn scratch(annotations: &HashMap<String, String>) -> Result<Option<Size>, Failure> {
    let size = match annotations.get(SCRATCH).map(String::as_str) {
        None => return Ok(None),
        Some(SCRATCH_ON) => SCRATCH_SIZE,
        Some(text) => parse_size(SCRATCH, text)?,
    };
    match size.0 < LEAST_SCRATCH.0 {
        true => Err(refuse(format!("annotation {SCRATCH}: a disk has at least 16M"))),
        false => Ok(Some(size)),
    }
}
