//! Loads a program into a task.

use abi::{PAGE_SIZE, rights};
use heapless::Vec;
use hw_tables::elf::{Elf, ElfError, Segment};
use native_rt::start::Boot;
use native_rt::{Space, Status, Task};
use proto::start::START_PAGE;

use crate::memory::Memory;
use crate::platform::PROCESSOR;

/// Lowest address of a program: the pages below stay unmapped, to catch null pointers.
const LOWEST: u64 = 0x1_0000;
/// Maximum number of loadable segments.
const MAX_SEGMENTS: usize = 8;

/// Error of loading a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// Not an ELF executable.
    Elf(ElfError),
    /// Not for this architecture.
    Machine,
    /// The segment at this address is outside of the range of programs, overlaps another one, is
    /// both writable and executable, or is not congruent with the pages of the file.
    Segment(u64),
    /// Too many segments.
    Segments,
    /// Memory is exhausted.
    Memory,
    /// The kernel refused the mapping.
    Map(Status),
}

/// A loaded program.
pub struct Program {
    /// Entry address.
    pub entry: u64,
    /// Bytes of private memory.
    pub bytes: u64,
    /// Bytes mapped from the bundle, shared with all instances of the program.
    pub shared: u64,
}

fn page_of(address: u64) -> u64 {
    address & !(PAGE_SIZE - 1)
}

/// Returns the pages that a segment touches: first address and length.
fn pages(segment: &Segment) -> (u64, u64) {
    let range = segment.virtual_range();
    let first = page_of(range.start);
    (first, range.end.next_multiple_of(PAGE_SIZE) - first)
}

/// Checks that segments are disjoint, inside the range of programs, and obey write xor execute.
fn check(elf: &Elf) -> Result<Vec<Segment, MAX_SEGMENTS>, LoadError> {
    if elf.machine() != PROCESSOR {
        return Err(LoadError::Machine);
    }
    let mut segments = Vec::new();
    let mut end_of_last = LOWEST;
    for segment in elf.segments().filter(|segment| segment.memsz != 0) {
        let bad = LoadError::Segment(segment.vaddr);
        if segment.vaddr < end_of_last || segment.vaddr + segment.memsz > START_PAGE {
            return Err(bad);
        }
        if segment.writable() && segment.executable() {
            return Err(bad);
        }
        let (first, length) = pages(&segment);
        if first < end_of_last {
            return Err(bad);
        }
        // A read-only segment is mapped from the file itself.
        let congruent = segment.offset % PAGE_SIZE == segment.vaddr % PAGE_SIZE;
        if !segment.writable() && (!congruent || segment.filesz != segment.memsz) {
            return Err(bad);
        }
        end_of_last = first + length;
        segments.push(segment).map_err(|_| LoadError::Segments)?;
    }
    Ok(segments)
}

/// Maps the program `file`, which is in the bundle at `offset`, into a task. Read-only segments are
/// shared with the bundle; writable ones are copied into memory of `owner`.
pub fn load(
    boot: &Boot,
    memory: &mut Memory,
    owner: usize,
    task: Task,
    offset: u64,
    file: &[u8],
) -> Result<Program, LoadError> {
    let elf = Elf::parse(file).map_err(LoadError::Elf)?;
    let (mut bytes, mut shared) = (0, 0);
    for segment in check(&elf)? {
        let (first, length) = pages(&segment);
        if !segment.writable() {
            shared += length;
            let execute = if segment.executable() { rights::EXECUTE } else { 0 };
            let source = boot
                .bundle_pages(page_of(offset + segment.offset), length)
                .ok_or(LoadError::Segment(segment.vaddr))?;
            task.map(source, first, rights::READ | execute).map_err(LoadError::Map)?;
            continue;
        }
        bytes += length;
        let window = memory.allocate(owner, length / PAGE_SIZE).ok_or(LoadError::Memory)?;
        if !window.write(segment.vaddr - first, elf.data(&segment)) {
            return Err(LoadError::Memory);
        }
        // Page by page: a program unmaps single pages of this, as guard pages of stacks, and the
        // kernel unmaps only whole mappings.
        for offset in (0..length).step_by(PAGE_SIZE as usize) {
            let page = window.part(offset, PAGE_SIZE).ok_or(LoadError::Memory)?;
            task.map(page, first + offset, rights::READ | rights::WRITE).map_err(LoadError::Map)?;
        }
    }
    Ok(Program { entry: elf.entry(), bytes, shared })
}
