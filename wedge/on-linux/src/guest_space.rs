//! The guest's address space in this process: the MMU ([`crate::mmu`]) with the calls of the host.

use core::fmt;
use core::sync::atomic::Ordering::SeqCst;

use host_linux::sys::{self, Backing, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::{Start, layout, option};
use vmm_mem::GuestMemory;
use wedge_core::VirtualCpu;
use wedge_x86::{CLOSED, READABLE};

use crate::isolation::mailbox::UserProcess;
use crate::isolation::{self, pkeys, signal_stacks};
use crate::mmu::exec_scan::Page;
use crate::mmu::guest_range;
use crate::mmu::host::{HostMap, MappingListener, STUB};
use crate::mmu::ram::{PAGE, Ram};
use crate::mmu::space::Steps;
use crate::mmu::steps::Begin;
use crate::mmu::syscall_patch::{MAX_CALLS, SLOTS, SLOTS_LENGTH, STUBS, stub_address};
use crate::mmu::{Mmu, Modes, VmView};
use crate::state::config::has;
use crate::state::current::CurrentProcess;
use crate::state::process::{own_index, slot};
use crate::state::shared::{shared, vcpu, vcpus};
use crate::state::statistics;
use crate::{clock, kick, profile, report};

/// Maps slots and stubs of rewritten system calls in a new process.
pub fn map_call_stubs() -> Result<(), Errno> {
    let length = SLOTS_LENGTH + u64::from(MAX_CALLS) * STUB as u64;
    let rights = linux::PROT_READ | linux::PROT_WRITE | linux::PROT_EXEC;
    // SAFETY: the range is reserved for them.
    unsafe { sys::map(SLOTS, length, rights, Backing::Own) }?;
    // User mode jumps through the slots.
    let data = linux::PROT_READ | linux::PROT_WRITE;
    pkeys::protect(SLOTS, SLOTS_LENGTH, data, READABLE)?;
    pkeys::protect(STUBS, length - SLOTS_LENGTH, rights, CLOSED)
}

/// The guest's address space in the process that runs the vCPU.
pub struct GuestSpace {
    process: CurrentProcess,
    ram: Ram,
    memory: GuestMemory,
    code: (u64, u64),
    modes: Modes,
}

impl GuestSpace {
    /// Creates the view of a process that runs the vCPU, with the VM's memory.
    pub fn new(process: CurrentProcess, start: &Start, ram: Ram, memory: GuestMemory) -> Self {
        let modes = Modes {
            keys: isolation::current().scans_code(),
            batches: !has(option::NO_BATCHES),
            profile: profile::is_on(),
        };
        Self { process, ram, memory, code: (start.code, start.code_end), modes }
    }

    /// Returns the MMU.
    pub fn mmu(&mut self) -> Mmu<'_, ProcessMap<'_>> {
        let (space, peer) = self.process.parts();
        let vm = VmView {
            ram: self.ram,
            memory: &self.memory,
            vcpus: vcpus(),
            index: own_index(),
            vcpu: vcpu(),
            slot: slot(),
            table: &shared().frames,
            code: self.code,
            modes: self.modes,
        };
        Mmu { space, host: ProcessMap { peer }, vm }
    }

    /// Returns the process of user mode.
    pub fn user_process(&mut self) -> &mut UserProcess {
        self.process.parts().1
    }

    /// Returns whether an address is in pages that are executed by single steps.
    pub fn is_stepped(&mut self, rip: u64) -> bool {
        self.process.parts().0.steps.contains(rip)
    }

    /// Decides before an entry whether the guest executes a single step.
    pub fn begin_step(&mut self, cpu: &mut VirtualCpu) -> Begin {
        let Steps { start, end, .. } = self.process.parts().0.steps;
        if start == end { Begin::Free } else { self.mmu().begin_step(cpu) }
    }

    /// Applies the table of copied frames before the guest runs.
    pub fn sync_before_entry(&mut self) {
        let settled = self.process.parts().0.applied.settled;
        if settled != shared().frames.begun.load(SeqCst) {
            self.mmu().sync_before_entry();
        }
    }

    /// Returns the right to this process's lists, to hand over the vCPU to another process.
    pub fn process(&mut self) -> &mut CurrentProcess {
        &mut self.process
    }
}

/// The host's page tables of this process, and what follows their changes.
pub struct ProcessMap<'a> {
    peer: &'a mut UserProcess,
}

impl HostMap for ProcessMap<'_> {
    fn map(&mut self, linear: u64, length: u64, rights: u32, offset: u64) -> Result<(), Errno> {
        guest_range::map_now(linear, length, rights, offset)
    }

    fn map_private(&mut self, page: u64, contents: &Page, rights: u32) -> Result<(), Errno> {
        let data = linux::PROT_READ | linux::PROT_WRITE;
        guest_range::map(page, PAGE, data, Backing::Own)?;
        // SAFETY: a page of the guest, mapped now; nothing executes or reads it during the write.
        unsafe { (page as *mut Page).write(*contents) };
        self.protect(page, PAGE, rights)
    }

    fn unmap(&mut self, start: u64, end: u64) -> Result<(), Errno> {
        guest_range::unmap(start, end - start)
    }

    fn protect(&mut self, linear: u64, length: u64, rights: u32) -> Result<(), Errno> {
        guest_range::protect(linear, length, rights)
    }

    fn close(&mut self, linear: u64, length: u64, rights: u32) -> Result<(), Errno> {
        pkeys::protect(linear, length, rights, CLOSED)
    }

    fn page(&self, page: u64) -> &Page {
        // SAFETY: by the contract of the trait the page is private memory, readable, and nothing
        // writes to it now.
        unsafe { &*(page as *const Page) }
    }

    fn read(&self, linear: u64, to: &mut [u8]) {
        for (at, byte) in (linear..).zip(to) {
            *byte = self.page(at & !(PAGE - 1))[(at % PAGE) as usize];
        }
    }

    fn code_copy(&mut self, offset: u64) -> &mut Page {
        // SAFETY: by the contract of the trait it is an offset in guest memory, and the copies are
        // mapped and as long. They belong to this vCPU; nothing executes them now.
        unsafe { &mut *((layout::COPIES + offset) as *mut Page) }
    }

    fn stub(&self, index: u32) -> [u8; STUB] {
        // Stubs are private memory.
        let mut code = [0; STUB];
        self.read(stub_address(index % MAX_CALLS), &mut code);
        code
    }

    fn put_stub(&mut self, index: u32, code: &[u8; STUB]) {
        let index = index % MAX_CALLS;
        // SAFETY: stubs and slots are private memory, mapped for the life of the process; user mode
        // does not run.
        unsafe {
            (stub_address(index) as *mut [u8; STUB]).write(*code);
            ((SLOTS + 8 * u64::from(index)) as *mut u64).write(stub_address(index));
        }
    }

    fn serialize(&mut self) {
        clock::serialize();
    }
}

impl MappingListener for ProcessMap<'_> {
    fn on_map(&mut self, linear: u64, length: u64, rights: u32, offset: u64) {
        self.peer.map(linear, length, rights, offset);
    }

    fn on_unmap(&mut self, start: u64, end: u64) {
        self.peer.unmap(start, end);
    }

    fn on_narrow(&mut self, start: u64, end: u64, rights: u32) {
        self.peer.narrow(start, end, rights);
    }

    fn on_stale(&mut self) {
        signal_stacks::mark_stale();
    }

    fn on_walk(&mut self, memory: &GuestMemory, root: u64, linear: u64) {
        profile::watch_walk(memory, slot(), root, linear);
    }

    fn on_follow(&mut self) {
        profile::follow(slot());
    }

    fn count(&mut self, counter: usize) {
        statistics::count(counter);
    }

    fn interrupt(&mut self, vcpu: usize) {
        kick::interrupt(vcpu);
    }

    fn yield_now(&mut self) {
        sys::yield_now();
    }

    fn fatal(&mut self, what: fmt::Arguments<'_>) -> ! {
        report::fatal(what)
    }
}
