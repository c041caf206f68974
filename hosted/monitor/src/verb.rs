//! Commands of `parador ctl`, which are no names of VMs.

use clap::Subcommand;
use hosted_command::value::Size;

/// Command of `parador ctl` to a VM.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum Verb {
    /// Print configuration and state of the VM (JSON).
    Status,
    /// Print statistics: events handled and host resources used (JSON).
    Stats,
    /// Print statistics for Prometheus.
    Metrics,
    /// Print past and new events, one JSON object per line, until the VM exits.
    Events,
    /// Start a VM that waits for it (parador run --wait-boot).
    Boot,
    /// Pause the guest.
    Pause,
    /// Resume the guest.
    Resume,
    /// Reset the VM.
    Reset,
    /// Set the target size of the memory balloon: memory that the guest returns to the host as far
    /// as it can, and takes back before it would have to kill an application.
    Balloon {
        /// Size, at least 64M less than the guest's memory.
        #[arg(value_name = "SIZE", value_parser = Size::parse)]
        size: Size,
    },
    /// Press the ACPI power button.
    Shutdown {
        /// Kill the VM, whatever the guest does.
        #[arg(long)]
        force: bool,
    },
    /// Print a table of statistics every second.
    Top {
        /// Number of tables [default: until the VM exits].
        #[arg(short = 'n', long, value_name = "COUNT")]
        count: Option<u64>,
    },
}

/// Returns whether a word is a command of `parador ctl`, and can't be the name of a VM.
pub fn is_verb(word: &str) -> bool {
    Verb::has_subcommand(word)
}
