//! No isolation: user mode can access the guest kernel and the wedge, whose own process isolates
//! them from the host.

use crate::isolation::contract::Isolation;

/// No isolation.
pub struct Unprotected;

impl Isolation for Unprotected {}
