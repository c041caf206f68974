//! `parador` as users run it. QEMU and Parador's programs are stand-ins: what they do is tested by
//! whole systems, here it is what the host program makes of it.

mod afterburn;
mod build;
mod check;
mod ci;
mod emulate;
mod fetch;
mod graph;
mod kernel;
mod limits;
mod rootfs;
mod run;
mod support;
mod trees;
