//! The guest kernel for the debugger: where breakpoints may be and how it is mapped.

use hosted_loader::Image;
use proto::hosted::debug::{BREAKPOINT, HALT, register};
use proto::hosted::layout;

/// Kernel properties that matter to the debugger.
pub enum GuestKernel {
    /// Guest of the process back end.
    Process {
        /// First address of the kernel's code.
        start: u64,
        /// Patch sites: address and length.
        sites: Vec<(u64, u64)>,
    },
    /// Guest of KVM, which chooses its own address.
    Kvm,
}

impl GuestKernel {
    /// Returns the properties of a pre-virtualized kernel.
    pub fn new(image: &Image<'_>) -> Self {
        Self::Process { start: image.start(), sites: image.site_ranges() }
    }

    /// Returns whether a breakpoint can be set at this address: kernel code, at an instruction that
    /// the wedge does not replace. `is_users`: the page is accessible in user mode.
    pub fn takes_breakpoint(&self, address: u64, is_users: bool) -> bool {
        match self {
            Self::Process { sites, .. } => {
                let is_kernel = (layout::IMAGE..layout::WEDGE).contains(&address)
                    || (layout::DIRECT..layout::GUEST_END).contains(&address);
                is_kernel && !is_inside(sites, address)
            }
            Self::Kvm => !is_users,
        }
    }

    /// Returns the opcode of a breakpoint.
    pub fn breakpoint(&self) -> u8 {
        match self {
            Self::Process { .. } => BREAKPOINT,
            Self::Kvm => HALT,
        }
    }

    /// Returns the index of the register with the page-table root of a linear address.
    pub fn root(&self, linear: u64) -> usize {
        match self {
            Self::Process { .. } if (layout::IMAGE..layout::LOW_END).contains(&linear) => {
                register::KERNEL_ROOT
            }
            _ => register::CR3,
        }
    }
}

/// Returns whether the address is inside a patch site, after its first byte.
fn is_inside(sites: &[(u64, u64)], address: u64) -> bool {
    let behind = sites.partition_point(|site| site.0 < address);
    let before = behind.checked_sub(1).and_then(|index| sites.get(index));
    before.is_some_and(|&(start, length)| address - start < length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_breakpoints_inside_of_sites() {
        let sites = [(16, 5), (32, 2)];
        let inside: Vec<u64> = (14..40).filter(|&at| is_inside(&sites, at)).collect();
        assert_eq!(inside, [17, 18, 19, 20, 33]);
    }
}
