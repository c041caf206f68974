//! vCPUs: there are none yet.

/// Processor structures of a vCPU. No value exists, so no vCPU does.
#[derive(Clone, Copy, Debug)]
pub enum NoVcpu {}
