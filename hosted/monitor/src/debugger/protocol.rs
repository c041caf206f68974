//! GDB's remote serial protocol, with a [`Session`] as its target.

use super::guest_kernel::GuestKernel;
use super::server::Connection;
use super::session::{Gone, Session, of, tid};
use gdbstub::arch::Arch;
use gdbstub::common::{Signal, Tid};
use gdbstub::conn::ConnectionExt;
use gdbstub::stub::run_blocking::{BlockingEventLoop, Event, WaitForStopReasonError};
use gdbstub::stub::{GdbStub, MultiThreadStopReason};
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadResume, MultiThreadResumeOps, MultiThreadSchedulerLocking,
    MultiThreadSchedulerLockingOps, MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::breakpoints::{
    Breakpoints, BreakpointsOps, SwBreakpoint, SwBreakpointOps,
};
use gdbstub::target::ext::section_offsets::{Offsets, SectionOffsets, SectionOffsetsOps};
use gdbstub::target::{Target, TargetError, TargetResult};
use gdbstub_arch::x86::X86_64_SSE;
use gdbstub_arch::x86::reg::X86_64CoreRegs;
use proto::hosted::debug::{VcpuDebug, command, register};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

/// General registers in GDB's order (rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8 ...), by their
/// instruction encoding.
const ORDER: [usize; 16] = [0, 3, 1, 2, 6, 7, 5, 4, 8, 9, 10, 11, 12, 13, 14, 15];

/// Serves one debugger.
pub fn serve(session: &mut Session, connection: Connection) -> Result<(), String> {
    session.stop_all().map_err(|gone| gone.to_string())?;
    match GdbStub::new(connection).run_blocking::<Events>(session) {
        Ok(_) => Ok(()),
        // The debugger disconnected without detaching.
        Err(error) if error.is_connection_error() => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// Event loop of a session while the VM runs.
enum Events {}

impl BlockingEventLoop for Events {
    type Target = Session;
    type Connection = Connection;
    type StopReason = MultiThreadStopReason<u64>;

    fn wait_for_stop_reason(
        target: &mut Session,
        connection: &mut Connection,
    ) -> Result<Event<Self::StopReason>, WaitForStopReasonError<Gone, io::Error>> {
        loop {
            if target.has_ended() {
                return Ok(Event::TargetStopped(MultiThreadStopReason::Exited(
                    target.control.exit_code(),
                )));
            }
            target.drain();
            if let Some(why) = target.stopped().map_err(WaitForStopReasonError::Target)? {
                return Ok(Event::TargetStopped(why));
            }
            if connection.peek().map_err(WaitForStopReasonError::Connection)?.is_some() {
                let byte = connection.read().map_err(WaitForStopReasonError::Connection)?;
                return Ok(Event::IncomingData(byte));
            }
            let Some(socket) = &target.connection else {
                return Err(WaitForStopReasonError::Target(Gone::new("no connection")));
            };
            let mut fds = [socket.as_fd(), target.news.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            // After an interruption, the loop checks again.
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
        }
    }

    fn on_interrupt(target: &mut Session) -> Result<Option<Self::StopReason>, Gone> {
        target.stop_all()?;
        let (tid, signal) = (tid(0), Signal::SIGINT);
        Ok(Some(MultiThreadStopReason::SignalWithThread { tid, signal }))
    }
}

impl Target for Session {
    type Arch = X86_64_SSE;
    type Error = Gone;

    fn base_ops(&mut self) -> BaseOps<'_, Self::Arch, Self::Error> {
        BaseOps::MultiThread(self)
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }

    fn support_section_offsets(&mut self) -> Option<SectionOffsetsOps<'_, Self>> {
        Some(self)
    }
}

impl SectionOffsets for Session {
    fn get_section_offsets(&mut self) -> Result<Offsets<u64>, Gone> {
        let start = match self.kernel {
            GuestKernel::Process { start, .. } => Some(start),
            GuestKernel::Kvm => self.linux(),
        };
        Ok(match start {
            // All segments are relocated by the same offset.
            Some(text_seg) => Offsets::Segments { text_seg, data_seg: None },
            None => Offsets::Sections { text: 0, data: 0, bss: None },
        })
    }
}

impl MultiThreadBase for Session {
    fn read_registers(
        &mut self,
        registers: &mut <X86_64_SSE as Arch>::Registers,
        tid: Tid,
    ) -> TargetResult<(), Self> {
        let words = self.registers(self.vcpu(tid)?)?.ok_or(TargetError::NonFatal)?;
        *registers = X86_64CoreRegs::default();
        for (value, place) in registers.regs.iter_mut().zip(ORDER) {
            *value = words[place];
        }
        registers.rip = words[register::RIP];
        registers.eflags = words[register::RFLAGS] as u32;
        registers.segments.cs = words[register::CS] as u32;
        registers.segments.ss = words[register::SS] as u32;
        Ok(())
    }

    fn write_registers(
        &mut self,
        registers: &<X86_64_SSE as Arch>::Registers,
        tid: Tid,
    ) -> TargetResult<(), Self> {
        let mut words = [0; register::CHANGEABLE];
        for (value, place) in registers.regs.iter().zip(ORDER) {
            words[place] = *value;
        }
        words[register::RIP] = registers.rip;
        words[register::RFLAGS] = registers.eflags.into();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let vcpu = self.vcpu(tid)?;
        self.registers(vcpu)?.ok_or(TargetError::NonFatal)?;
        Ok(self.set_bytes(of(vcpu, offset_of!(VcpuDebug, registers)), &bytes)?)
    }

    fn read_addrs(&mut self, start: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        let length = data.len();
        let read = self.pages(self.vcpu(tid)?, start, length, |memory, at, done, count| {
            memory.read_exact_at(&mut data[done..done + count], at)
        });
        if read == 0 && length != 0 { Err(TargetError::NonFatal) } else { Ok(read) }
    }

    fn write_addrs(&mut self, start: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        let written = self.pages(self.vcpu(tid)?, start, data.len(), |memory, at, done, count| {
            memory.write_all_at(&data[done..done + count], at)
        });
        if written == data.len() { Ok(()) } else { Err(TargetError::NonFatal) }
    }

    fn list_active_threads(&mut self, is_active: &mut dyn FnMut(Tid)) -> Result<(), Gone> {
        let mut shown = Vec::new();
        for vcpu in 0..self.vcpus {
            shown.extend(self.registers(vcpu)?.map(|_| vcpu));
        }
        // GDB requires a thread.
        let all = if shown.is_empty() { (0..self.vcpus).collect() } else { shown };
        all.into_iter().for_each(|vcpu| is_active(tid(vcpu)));
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }
}

impl From<Gone> for TargetError<Gone> {
    fn from(gone: Gone) -> Self {
        Self::Fatal(gone)
    }
}

impl MultiThreadResume for Session {
    fn resume(&mut self) -> Result<(), Gone> {
        self.go()
    }

    fn clear_resume_actions(&mut self) -> Result<(), Gone> {
        self.actions.clear();
        self.locked = false;
        Ok(())
    }

    fn set_resume_action_continue(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), Gone> {
        self.actions.insert(tid.get() - 1, command::GO);
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadSingleStep for Session {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), Gone> {
        self.actions.insert(tid.get() - 1, command::STEP);
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for Session {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), Gone> {
        self.locked = true;
        Ok(())
    }
}

impl Breakpoints for Session {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Session {
    fn add_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.add(address))
    }

    fn remove_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.remove(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debugger::session::tests::session;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_end_of_the_vm_has_its_exit_code() {
        let (mut session, _wakeup) = session(1);
        session.control.ended(7, "test");
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut connection: Connection = Box::new(ours);
        let event = Events::wait_for_stop_reason(&mut session, &mut connection);
        let exited = MultiThreadStopReason::Exited(7);
        assert!(matches!(event, Ok(Event::TargetStopped(why)) if why == exited));
    }

    #[test]
    fn a_vcpu_that_has_never_stopped_has_no_registers_and_addresses() {
        let (mut session, _wakeup) = session(1);
        let mut registers = X86_64CoreRegs::default();
        let read = session.read_registers(&mut registers, tid(0));
        assert!(matches!(read, Err(TargetError::NonFatal)));
        let written = session.write_registers(&registers, tid(0));
        assert!(matches!(written, Err(TargetError::NonFatal)));
        let read = session.read_addrs(0x1000, &mut [0; 8], tid(0));
        assert!(matches!(read, Err(TargetError::NonFatal)));
        let halts = of(0, offset_of!(VcpuDebug, halts));
        session.set_bytes(halts, &1_u32.to_le_bytes()).unwrap();
        assert!(session.read_registers(&mut registers, tid(0)).is_ok());
        assert!(matches!(session.read_addrs(0x1000, &mut [0; 8], tid(0)), Ok(8)));
    }
}
