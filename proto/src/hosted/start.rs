//! The loader's record at offset 0 of shared memory.

use super::layout;

/// Magic number, first word of the record: "PARADORW".
pub const MAGIC: u64 = u64::from_le_bytes(*b"PARADORW");
/// Version of the record.
pub const VERSION: u64 = 8;

macro_rules! record {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// The loader's record.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Start {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Start {
            /// Words of the record, magic number and version included.
            pub const WORDS: usize = 2 + [$(stringify!($field)),*].len();

            /// Encodes the record.
            pub fn to_words(&self) -> [u64; Self::WORDS] {
                [MAGIC, VERSION, $(self.$field,)*]
            }

            /// Decodes the record; `None` if magic number or version differ.
            pub fn from_words(words: &[u64; Self::WORDS]) -> Option<Self> {
                let [MAGIC, VERSION, $($field,)*] = *words else { return None };
                Some(Self { $($field,)* })
            }
        }
    };
}

record! {
    /// Guest memory in bytes.
    memory,
    /// Guest-physical end of memory below 4 GiB; the rest begins at 4 GiB.
    hole,
    /// XSAVE components that the guest may enable (`XCR0`).
    xcr0,
    /// Entry point of the kernel.
    rip,
    /// Initial stack pointer.
    rsp,
    /// First argument of the entry point.
    rdi,
    /// Base of `GS`.
    gs_base,
    /// Guest-physical address of the initial root page table.
    cr3,
    /// Linear address of the global descriptor table.
    gdt,
    /// Limit of the global descriptor table.
    gdt_limit,
    /// Code segment selector.
    cs,
    /// Guest-physical address of the page table that translates [`layout::IMAGE`] to
    /// [`layout::LOW_END`] in every address space.
    kernel_root,
    /// Linear address of the table of patch sites.
    sites,
    /// Length of the table in bytes.
    sites_length,
    /// Linear address of Linux's `__text_poke(how, to, from, length)`, which the wedge replaces; 0:
    /// none.
    text_poke,
    /// Linear address of `text_poke_memcpy`, the value of `how` for a copy.
    text_poke_memcpy,
    /// Number of vCPUs.
    vcpus,
    /// Linear address of the variable in which Linux leaves the entry point of a secondary CPU.
    initial_code,
    /// Linear address of the variable with a secondary CPU's stack pointer.
    initial_stack,
    /// Linear address of the variable with a secondary CPU's `GS` base.
    initial_gs,
    /// Linear address of a secondary CPU's GDT descriptor: limit, then base.
    early_gdt,
    /// Guest-physical address of the root page table of secondary CPUs.
    initial_cr3,
    /// Linear address of the kernel's code.
    code,
    /// End of the kernel's code, exclusive.
    code_end,
    /// Options: bits of [`option`](super::option).
    options,
    /// Number of disks.
    disks,
    /// Number of networks.
    nets,
    /// Least severe messages that are printed: see [`log`](super::log).
    log,
    /// Target of the balloon in pages of 4 KiB, plus 1; 0: the guest has no balloon.
    balloon,
    /// Number of shared directories.
    shares,
    /// The guest's vsock CID; 0: no vsock device.
    vsock,
    /// Virtio console in addition to the serial port: see [`console`](super::console).
    console,
}

const _: () = assert!(Start::WORDS as u64 * 8 <= layout::DISKS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_round_trips() {
        let start = Start { memory: 1, sites_length: 7, options: 3, ..Start::default() };
        let mut words = start.to_words();
        assert_eq!(Start::from_words(&words), Some(start));
        words[1] += 1;
        assert_eq!(Start::from_words(&words), None);
    }
}
