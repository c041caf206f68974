//! PCI functions that guests drive themselves.

use abi::{PAGE_SIZE, rights};
use hw_tables::pci::BARS;
use native_rt::start::Boot;
use proto::start::{
    FUNCTION_STRIDE, FUNCTIONS, GUEST_RAM, PassThrough, PassThroughKind, Range, RangeKind,
    function_registers, slot,
};
use proto::system::PciClass;

use crate::child::{Child, FOR_GUESTS, Resources, StartError, trigger};
use crate::iommu::{Iommu, NoRoom};
use crate::pci::{Address, Function, Pci};
use crate::sessions::{add_bar, find, of_line};

/// A VM: its index among all children, and the guest-physical address of its memory, if that is not
/// the board's.
pub type Guest = (usize, Option<u64>);

/// Gives a VM a function, its device `number`: registers, configuration (read-only), interrupt by
/// line; and the function the guest's memory. Bus mastering is on at last.
pub fn connect(
    child: &mut Child,
    resources: &mut Resources,
    iommu: Option<&mut Iommu>,
    (vm, identity): Guest,
    (number, class, index): (usize, PciClass, u8),
) -> Result<PassThrough, StartError> {
    let iommu = iommu.ok_or(StartError::NoIommu)?;
    let function = find(resources.boot, class, index).ok_or(StartError::Device)?;
    if iommu.is_of_another(vm, function.address) {
        return Err(StartError::Taken);
    }
    let line = function.line().ok_or(StartError::Device)?;
    if !function.disable() {
        return Err(StartError::Device);
    }
    if !function.reset() {
        return Err(StartError::NoReset);
    }
    if !function.is_translated() {
        return Err(StartError::Untranslated);
    }
    add_registers(child, resources.boot, &function, number)?;
    let interrupt = (line.interrupt, trigger(line.is_level));
    child
        .add_interrupt(resources, interrupt, slot::PASS_THROUGH + number as u64)
        .map_err(of_line)?;
    let memory = (identity.unwrap_or(GUEST_RAM), &child.guest()[..]);
    let allowed = iommu.allow_guest(&mut resources.memory, vm, function.address, memory);
    allowed.map_err(|NoRoom| StartError::Memory)?;
    function.enable_line();
    function.start();
    native_rt::info!("guest drives PCI function {}", function.address);
    Ok(PassThrough { kind: PassThroughKind::Pci, is_level: line.is_level })
}

/// Maps a function's configuration space and its registers, each at a multiple of their length. The
/// VMM may delegate the registers to its guest.
fn add_registers(
    child: &mut Child,
    boot: &Boot,
    function: &Function,
    number: usize,
) -> Result<(), StartError> {
    let first = FUNCTIONS + number as u64 * FUNCTION_STRIDE;
    let end = first + FUNCTION_STRIDE;
    let configuration = boot.device_pages(function.configuration, PAGE_SIZE);
    let configuration = configuration.ok_or(StartError::Device)?;
    let kind = RangeKind::Configuration;
    child.add_registers(kind, configuration, first, rights::READ, number as u64, PAGE_SIZE)?;
    let mut next = first + PAGE_SIZE;
    for bar in &function.bars() {
        let is_alone = bar.base % PAGE_SIZE == 0 && !function.shares_pages(bar);
        if !is_alone {
            return Err(StartError::SharedPage);
        }
        let place = next.checked_next_multiple_of(bar.length.max(PAGE_SIZE));
        let place = place.filter(|place| place.checked_add(bar.length).is_some_and(|at| at <= end));
        let place = place.ok_or(StartError::Place)?;
        next = place + bar.length;
        let window = boot.device_pages(bar.base, bar.length).ok_or(StartError::Device)?;
        let range = function_registers(number, bar.number);
        add_bar(child, function, bar, window, (place, range), FOR_GUESTS)?;
    }
    Ok(())
}

/// Takes the function at an address, device `number`, from a VM whose vCPUs may still run: no vCPU
/// can start it again, and it cannot access memory any more. Returns `false` if it still may: the
/// VM's memory must not be used again then. A disabled function is not enough, as the IOMMU's
/// cached translations would be those of the next VM with this index.
pub fn vm_ended(
    boot: &Boot,
    iommu: &mut Iommu,
    (vm, child): (usize, &Child),
    (number, address): (usize, Address),
) -> bool {
    match Pci::find(boot).and_then(|pci| pci.function(address)) {
        Some(function) => stop(boot, &function, child, number),
        None => native_rt::error!("PCI function {address} is absent"),
    }
    let is_denied = iommu.deny(vm, address);
    iommu.report();
    is_denied
}

/// Revokes the registers of a function, and disables and resets it.
fn stop(boot: &Boot, function: &Function, child: &Child, number: usize) {
    // No sizing: it would stop the registers while a vCPU accesses them.
    for bar in 0..BARS {
        let known = function_registers(number, bar);
        let is_it = |range: &&Range| range.kind == RangeKind::Registers && range.physical == known;
        let range = child.ranges().iter().find(is_it);
        let base = range.and_then(|_| function.base(bar));
        if let (Some(range), Some(base)) = (range, base) {
            // It fails only if nothing was delegated.
            let _ = boot.device_pages(base, range.length).map(native_rt::Window::revoke);
        }
    }
    let is_disabled = function.disable();
    let is_reset = function.reset();
    let address = function.address;
    match (is_disabled, is_reset) {
        (true, true) => native_rt::info!("PCI function {address} is reset"),
        (true, false) => native_rt::error!("cannot reset PCI function {address}"),
        (false, _) => native_rt::error!("cannot disable PCI function {address}"),
    }
}
