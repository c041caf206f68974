//! Accesses to ports, memory-mapped registers and APIC registers; reports of unsupported ones.

use vmm_bus::{Access, Device, Piece};
use vmm_x86::Unknown;
use vmm_x86::apic::local;
use vmm_x86::apic::local::Mode;

use super::PcBoard;
use crate::interrupts::{CHIPS, InterruptRouter};
use crate::{Host, Level, layout};

/// Severity of probing: systems detect hardware by accessing absent devices.
const PROBING: Level = Level::Info;

/// A key for [`crate::once::Once`]; addresses of texts (kind 0) are below 2^56.
const fn key(kind: u64, what: u64) -> u64 {
    kind << 56 | (what & ((1 << 56) - 1))
}

impl<H: Host, const CPUS: usize> PcBoard<'_, '_, H, CPUS> {
    pub(super) fn read_piece(&mut self, piece: Piece) -> u64 {
        match piece.device.and_then(|device| CHIPS.get(usize::from(device))) {
            Some(&chip) => self
                .with_chip(chip, |chip, env| chip.read(piece.access, env))
                .unwrap_or(piece.access.open_bus()),
            None => self.unknown_port(piece.access),
        }
    }

    pub(super) fn write_piece(&mut self, piece: Piece, value: u64) {
        match piece.device.and_then(|device| CHIPS.get(usize::from(device))) {
            Some(&chip) => {
                self.with_chip(chip, |chip, env| chip.write(piece.access, value, env));
            }
            None => {
                self.unknown_port(piece.access);
            }
        }
    }

    #[cold]
    pub(super) fn unknown_port(&mut self, access: Access) -> u64 {
        self.machine.router.counters.unknown_ports += 1;
        let port = access.offset;
        let text = format_args!("unknown port {port:#x}");
        self.machine.router.log_once(self.host, PROBING, key(1, port), text);
        access.open_bus()
    }

    #[cold]
    pub(super) fn unknown_memory(&mut self, address: u64) {
        self.machine.router.counters.unknown_memory += 1;
        let page = address & !0xfff;
        let text = format_args!("no memory or device at guest-physical address {address:#x}");
        self.machine.router.log_once(self.host, PROBING, key(2, page), text);
    }

    /// Offset in the page of this CPU's local APIC.
    pub(super) fn in_local_apic(&self, cpu: usize, address: u64) -> Option<u64> {
        let apic = &self.machine.apics[cpu];
        let offset = address.wrapping_sub(apic.base());
        (apic.mode() == Mode::XApic && offset < local::spec::LEN).then_some(offset)
    }

    #[inline]
    pub(super) fn port_in(&mut self, port: u16, size: u8) -> u32 {
        if port == layout::PCI_ADDRESS && size == 4 {
            return self.unknown_port(Access::new(port.into(), size)) as u32;
        }
        let maps = &self.fixed.maps;
        maps.ports.read(port.into(), size, |piece| self.read_piece(piece)) as u32
    }

    #[inline]
    pub(super) fn port_out(&mut self, port: u16, size: u8, value: u32) {
        if port == layout::PCI_ADDRESS && size == 4 {
            self.unknown_port(Access::new(port.into(), size));
            return;
        }
        let maps = &self.fixed.maps;
        maps.ports.write(port.into(), size, value.into(), |piece, value| {
            self.write_piece(piece, value);
        });
    }

    pub(super) fn apic_read(&mut self, cpu: usize, msr: u32) -> Option<u64> {
        let value = self.with_apic(cpu, |apic, env| apic.read_msr(msr, env)).ok();
        if value.is_none() {
            self.unknown(Unknown::MsrRead(msr));
        }
        value
    }

    pub(super) fn apic_write(&mut self, cpu: usize, msr: u32, value: u64) -> Option<()> {
        let done = self.with_apic(cpu, |apic, env| apic.write_msr(msr, value, env)).ok();
        if done.is_none() {
            self.unknown(Unknown::MsrWrite(msr, value));
        }
        done
    }

    pub(super) fn read_memory(&mut self, cpu: usize, address: u64, size: u8) -> u64 {
        let maps = &self.fixed.maps;
        if let Some(offset) = self.in_local_apic(cpu, address) {
            return maps.local_apic.read(offset, size, |Piece { device, access }| match device {
                Some(_) => self.with_apic(cpu, |apic, env| apic.read(access, env)),
                None => access.open_bus(),
            });
        }
        maps.io_apic.read(address, size, |piece| match piece.device {
            Some(_) => self.read_piece(piece),
            None => {
                self.unknown_memory(piece.access.offset);
                piece.access.open_bus()
            }
        })
    }

    pub(super) fn write_memory(&mut self, cpu: usize, address: u64, size: u8, value: u64) {
        let maps = &self.fixed.maps;
        if let Some(offset) = self.in_local_apic(cpu, address) {
            maps.local_apic.write(offset, size, value, |Piece { device, access }, value| {
                if device.is_some() {
                    self.with_apic(cpu, |apic, env| apic.write(access, value, env));
                }
            });
            return;
        }
        maps.io_apic.write(address, size, value, |piece, value| match piece.device {
            Some(_) => self.write_piece(piece, value),
            None => self.unknown_memory(piece.access.offset),
        });
    }

    #[cold]
    pub(super) fn unknown(&mut self, what: Unknown) {
        let InterruptRouter { counters, .. } = &mut self.machine.router;
        match what {
            Unknown::MsrRead(_) | Unknown::MsrWrite(..) => counters.unknown_registers += 1,
            Unknown::Instruction { .. } => counters.unknown_instructions += 1,
            Unknown::Exit(_) | Unknown::Hypercall(_) | Unknown::Other(..) => counters.other += 1,
        }
        let router = &mut self.machine.router;
        let host = &mut *self.host;
        match what {
            Unknown::MsrRead(msr) => {
                let text = format_args!("read of unknown MSR {msr:#x}");
                router.log_once(host, PROBING, key(3, msr.into()), text);
            }
            Unknown::MsrWrite(msr, value) => {
                let text = format_args!("refused write of {value:#x} to MSR {msr:#x}");
                router.log_once(host, PROBING, key(4, msr.into()), text);
            }
            Unknown::Instruction { rip, bytes } => {
                let text = format_args!(
                    "instruction at {rip:#x} not emulated: {:02x?}",
                    bytes.to_le_bytes()
                );
                router.log_once(host, Level::Warning, key(5, bytes), text);
            }
            Unknown::Exit(code) => {
                let text = format_args!("unknown exit {code:#x}");
                router.log_once(host, Level::Warning, key(6, code), text);
            }
            Unknown::Hypercall(number) => {
                let text = format_args!("unknown hypercall {number:#x}");
                router.log_once(host, Level::Warning, key(7, number), text);
            }
            Unknown::Other(text, value) => {
                let address = text.as_ptr().addr() as u64;
                let text = format_args!("{text}: {value:#x}");
                router.log_once(host, Level::Warning, key(0, address), text);
            }
        }
    }
}
