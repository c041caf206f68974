//! A host for unit tests of the MMU.
