//! Handlers of VM exits.

use super::*;
use crate::run::exits::APIC_ENABLED;
use hw_x86::cpuid::{VTLB_SIGNATURE, leaf};
use hw_x86::kvm::hypercall;

#[test]
fn the_wall_clock_has_nanoseconds() {
    const RECORD: u64 = 0x2004;
    let (mut cpu, mut vcpu, mut platform) = guest(&[0xf4]);
    assert!(cpu.write_msr(&mut vcpu, &mut platform, kvm::WALL_CLOCK, RECORD).is_some());
    let words = [0, 4, 8].map(|offset| platform.memory.read::<u32>(RECORD + offset).unwrap());
    assert_eq!(words, [2, 1_700_000_000, 250_000_000]);
    assert_eq!(cpu.write_msr(&mut vcpu, &mut platform, kvm::WALL_CLOCK, u64::MAX - 3), None);
}

#[test]
fn accesses_are_answered_and_change_no_register() {
    const NO_SUCH_MSR: u64 = 0xdead_0000;
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    let accesses = [
        (Space::Port, 0x3f8, 1, None),
        (Space::Port, 0x3f8, 2, Some(0x4142)),
        (Space::Memory, 0xfe00_0000, 3, None),
        (Space::Memory, 0xfe00_0010, 8, Some(u64::MAX)),
        (Space::Msr, 0x830, 8, None),
        (Space::Msr, 0x830, 8, Some(0x31)),
        (Space::Msr, NO_SUCH_MSR, 8, None),
        (Space::Msr, NO_SUCH_MSR, 8, Some(1)),
    ];
    for (space, address, size, value) in accesses {
        vcpu.then(move |_| Exit::Access(Access { space, address, size, value }));
    }
    play(&mut cpu, &mut vcpu, &mut platform);
    let answers = [
        Some(0xffff_ffff),
        Some(0),
        Some(0xfe_0000_0003),
        Some(0),
        Some(0x55),
        Some(0),
        None,
        None,
    ];
    assert_eq!(vcpu.answers, answers);
    assert_eq!(platform.ports, [(0x3f8, 1, 0), (0x3f8, 2, 0x4142)]);
    assert_eq!(platform.written, [(0xfe00_0010, 8, u64::MAX)]);
    assert!(platform.requested.contains(&0x31));
    assert_eq!((vcpu.get(Reg::Rip), vcpu.gpr(Gpr::Rax)), (CODE, 0));
}

#[test]
fn interrupts_to_several_by_hypercall() {
    // VMMCALL.
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0x01, 0xd9]);
    let mut call = |platform: &mut TestPlatform, [low, high, first, command]: [u64; 4]| {
        vcpu.set(Reg::Rip, CODE);
        vcpu.set_gpr(Gpr::Rax, hypercall::SEND_IPI);
        for (register, value) in
            [(Gpr::Rbx, low), (Gpr::Rcx, high), (Gpr::Rdx, first), (Gpr::Rsi, command)]
        {
            vcpu.set_gpr(register, value);
        }
        vcpu.then(|_| Exit::Hypercall);
        play(&mut cpu, &mut vcpu, platform);
        assert_eq!(vcpu.get(Reg::Rip), CODE + 3);
        vcpu.gpr(Gpr::Rax) as i64
    };
    assert_eq!(call(&mut platform, [0b101, 0, 2, 0x4031]), 2, "ids 2 and 4");
    assert_eq!(call(&mut platform, [0, 1, 0, 0x400]), 0, "id 64");
    // Shorthands, logical destinations, INIT and start-up are not supported by the hypercall.
    for command in [0x4_0031, 0xc_0031, 0x831, 0x500, 0x604, 0x131] {
        assert_eq!(call(&mut platform, [1, 0, 0, command]), hypercall::INVALID);
    }
    let message = InterruptMessage {
        destination: 0,
        logical: false,
        delivery: 0,
        vector: 0x31,
        level: false,
    };
    let nmi = InterruptMessage { delivery: 4, vector: 0, ..message };
    let expected =
        [(ApicIds { first: 2, set: 0b101 }, message), (ApicIds { first: 0, set: 1 << 64 }, nmi)];
    assert_eq!(platform.multicasts, expected);
    let ids = ApicIds { first: 250, set: u128::MAX };
    assert_eq!(
        [249, 250, 377, 378, 0].map(|id| ids.contains(id)),
        [false, true, true, false, false]
    );
}

#[test]
fn stolen_time_and_flushes_by_the_record() {
    const RECORD: u64 = 0x2000;
    const STATE: u64 = RECORD + steal_time::STATE;
    let (mut cpu, mut vcpu, mut platform) = guest(&[0xf4]);
    let write = |cpu: &mut Cpu, vcpu: &mut ScriptedVcpu, platform: &mut TestPlatform, value| {
        cpu.write_msr(vcpu, platform, kvm::STEAL_TIME, value)
    };
    let memory = platform.memory;
    let record = || {
        let word = |field| memory.read::<u32>(RECORD + field).unwrap();
        let steal = memory.read::<u64>(RECORD + steal_time::STEAL).unwrap();
        (steal, word(steal_time::VERSION), word(steal_time::STATE))
    };
    for bad in [RECORD | 3, RECORD | 0x21, 0x1_0001, 0xffc1 + 0x40] {
        assert_eq!(write(&mut cpu, &mut vcpu, &mut platform, bad), None);
    }
    // Time stolen before the record was named is not reported.
    vcpu.stolen = 500;
    assert!(write(&mut cpu, &mut vcpu, &mut platform, RECORD | 1).is_some());
    assert_eq!(cpu.read_msr(&mut vcpu, &mut platform, kvm::STEAL_TIME), Some(RECORD | 1));
    assert_eq!((record(), vcpu.halts), ((0, 2, 0), true));
    play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(record(), (0, 2, 0), "nothing was stolen, nothing is written");
    vcpu.stolen = 800;
    play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(record(), (300, 4, 0));
    // The vCPU sleeps and is woken: by itself, or after another vCPU requested a flush.
    for (asks, flushes) in [(false, 0), (true, 1), (false, 1)] {
        vcpu.set(Reg::Rip, CODE);
        interrupts(&mut vcpu, true);
        vcpu.then(|_| Exit::Hlt);
        assert!(matches!(cpu.run(&mut vcpu, &mut platform), StopReason::Idle { .. }));
        assert!(matches!(cpu.run(&mut vcpu, &mut platform), StopReason::Idle { .. }), "still");
        assert_eq!(record().2, steal_time::PREEMPTED);
        if asks {
            memory.write(STATE, steal_time::PREEMPTED | steal_time::FLUSH_TLB).unwrap();
        }
        platform.request(0x31);
        vcpu.then(move |vcpu| {
            assert_eq!((vcpu.flushes, memory.read(STATE)), (flushes, Ok(0_u32)));
            take(vcpu);
            Exit::Spurious
        });
        play(&mut cpu, &mut vcpu, &mut platform);
    }
    // A guest that corrupts the word harms only itself.
    cpu.steal.leave(&memory);
    memory.write(STATE, u32::MAX).unwrap();
    play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!((vcpu.flushes, record()), (2, (300, 4, 0)));
    // Another record continues the count; a cleared enable bit disables it.
    assert!(write(&mut cpu, &mut vcpu, &mut platform, RECORD | 1).is_some());
    assert_eq!(record(), (300, 6, 0));
    platform.init = true;
    assert!(matches!(cpu.run(&mut vcpu, &mut platform), StopReason::Idle { .. }));
    assert_eq!((record(), cpu.steal.get(), vcpu.halts), ((300, 6, 0), 0, false));
}

#[test]
fn a_disabled_local_apic_is_hidden() {
    const APIC: u64 = 1 << 9;
    let has = |number: u64, base: u64| {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0xa2]);
        platform.apic_base = Some(base);
        vcpu.set_gpr(Gpr::Rax, number);
        vcpu.next_rip = CODE + 2;
        vcpu.then(|_| Exit::Cpuid);
        play(&mut cpu, &mut vcpu, &mut platform);
        vcpu.gpr(Gpr::Rdx) & APIC != 0
    };
    for number in [1, 0x8000_0001] {
        assert!(has(number, 0xfee0_0000 | APIC_ENABLED), "{number:#x}");
        assert!(!has(number, 0xfee0_0000), "{number:#x}");
    }
}

/// `RFLAGS.RF` ends with the instruction, also if it is emulated.

#[test]
fn a_breakpoint_is_armed_again_after_an_emulated_instruction() {
    let io = IoExit { port: 1, size: 1, write: true, string: false, rep: false, next_rip: CODE };
    let fault = MemoryFault { gpa: 0, write: false, fetch: false, walk: false };
    let flags = |exit: Exit, emulated| {
        let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0xa2]);
        platform.emulated = emulated;
        vcpu.set_gpr(Gpr::Rcx, 0x80b);
        vcpu.next_rip = CODE + 2;
        vcpu.then(move |vcpu| {
            vcpu.set(Reg::Rflags, RFLAGS_RF | 2);
            exit
        });
        let entries = play(&mut cpu, &mut vcpu, &mut platform);
        (vcpu.get(Reg::Rflags), entries[1].0)
    };
    let next = Emulated::Next(CODE + 2);
    for exit in [Exit::Cpuid, Exit::Io(io), Exit::Msr { write: true }, Exit::MemoryFault(fault)] {
        assert_eq!(flags(exit, next), (2, Event::NONE), "{exit:?}");
    }
    let string = Exit::Io(IoExit { string: true, ..io });
    assert_eq!(flags(string, next), (2, Event::NONE));
    // Not finished, or not emulated.
    assert_eq!(flags(string, Emulated::Again), (RFLAGS_RF | 2, Event::NONE));
    let raised = Event::exception_code(14, 0);
    assert_eq!(flags(string, Emulated::Raise(raised)), (RFLAGS_RF | 2, raised));
}

/// An iteration of a repeated string instruction is a step; its breakpoint is not reported
/// again.

#[test]
fn steps_and_iterations() {
    let string = IoExit { port: 1, size: 1, write: true, string: true, rep: true, next_rip: 0 };
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    platform.emulated = Emulated::Again;
    vcpu.then(move |vcpu| {
        vcpu.set(Reg::Rflags, RFLAGS_TF | 2);
        vcpu.set(Reg::Dr7, DR7_GENERAL_DETECT | 0x400);
        vcpu.set(Reg::InterruptShadow, 1);
        Exit::Io(string)
    });
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(entries[1].0, Event::exception(DEBUG));
    assert_eq!((vcpu.get(Reg::Rip), vcpu.get(Reg::InterruptShadow)), (CODE, 0));
    assert_eq!(vcpu.get(Reg::Rflags), RFLAGS_TF | RFLAGS_RF | 2);
    assert_eq!((vcpu.get(Reg::Dr6), vcpu.get(Reg::Dr7)), (DR6_SINGLE_STEP, 0x400));
    // The last iteration.
    platform.emulated = Emulated::Next(CODE + 2);
    vcpu.then(move |_| Exit::Io(string));
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(entries[1].0, Event::exception(DEBUG));
    assert_eq!((vcpu.get(Reg::Rip), vcpu.get(Reg::Rflags)), (CODE + 2, RFLAGS_TF | 2));
}

#[test]
fn event_delivery_outside_memory_ends_the_machine() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    let fault = MemoryFault { gpa: 0x1_0000, write: true, fetch: false, walk: false };
    vcpu.then(move |vcpu| {
        vcpu.slot = Event::interrupt(0x31);
        Exit::MemoryFault(fault)
    });
    assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(Outcome::TripleFault));
    assert_eq!(platform.unknown.len(), 1);
}

#[test]
fn cpuid_with_and_without_help() {
    // CPUID at CODE, with a prefix at CODE + 8.
    let code = [0x0f, 0xa2, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x66, 0x0f, 0xa2];
    let (mut cpu, mut vcpu, mut platform) = guest(&code);
    vcpu.then(|_| Exit::Cpuid);
    vcpu.then(|vcpu| {
        assert_eq!(vcpu.get(Reg::Rip), CODE + 2);
        assert_eq!([Gpr::Rbx, Gpr::Rcx, Gpr::Rdx].map(|r| vcpu.gpr(r)), [1, 2, 3]);
        vcpu.set(Reg::Rip, CODE + 8);
        Exit::Cpuid
    });
    vcpu.then(|vcpu| {
        assert_eq!(vcpu.get(Reg::Rip), CODE + 11);
        vcpu.next_rip = 0x7777;
        Exit::Cpuid
    });
    vcpu.then(|vcpu| {
        assert_eq!(vcpu.get(Reg::Rip), 0x7777);
        vcpu.next_rip = 0;
        vcpu.set(Reg::Rip, CODE + 3); // no CPUID there
        Exit::Cpuid
    });
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(entries[4].0, UNDEFINED);
    assert!(matches!(platform.unknown[..], [Unknown::Instruction { .. }]));
    assert_eq!(cpu.exits()[Exit::Cpuid.index()], 4);
}

#[test]
fn a_guest_reads_the_events_of_its_vtlb() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0xa2, 0x0f, 0xa2]);
    vcpu.vtlb_events = Some(5);
    vcpu.then(|vcpu| {
        vcpu.set_gpr(Gpr::Rax, leaf::VTLB_EVENTS.into());
        Exit::Cpuid
    });
    vcpu.then(|vcpu| {
        let result = [Gpr::Rax, Gpr::Rbx, Gpr::Rdx].map(|register| vcpu.gpr(register));
        assert_eq!(result, [5, 0, VTLB_SIGNATURE.into()]);
        vcpu.vtlb_events = None;
        vcpu.set_gpr(Gpr::Rax, leaf::VTLB_EVENTS.into());
        Exit::Cpuid
    });
    vcpu.then(|vcpu| {
        assert_eq!(vcpu.gpr(Gpr::Rdx), 0);
        Exit::Cpuid
    });
    play(&mut cpu, &mut vcpu, &mut platform);
}

#[test]
fn cached_instructions_are_verified() {
    use hw_x86::paging::entry;
    let memory = &TestPlatform::new().memory;
    let table = entry::PRESENT | entry::WRITE;
    memory.write(0x8000, 0x9000 | table).unwrap();
    memory.write(0x9000, 0xa000 | table).unwrap();
    memory.write(0xa000, 0xb000 | table).unwrap();
    memory.write(0xb008, CODE | table).unwrap();
    memory.write_slice(CODE, &[0x0f, 0xa2]).unwrap();
    let mut vcpu = ScriptedVcpu::long(0x8000);
    let translated =
        paging(&mut vcpu).translate(&GuestTables(memory), 0x1000, Intent::Fetch, false);
    assert_eq!(translated.map(|found| (found.address, found.left())), Ok((CODE, 0x1000)));
    let mut cache = FetchCache::new();
    vcpu.set(Reg::Rip, 0x1000);
    let next = |cache: &mut FetchCache, vcpu: &mut ScriptedVcpu, memory: &GuestMemory| {
        cache.next_rip(vcpu, memory, Pattern::CPUID)
    };
    for _ in 0..2 {
        assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1002));
    }
    // The page moves and the instruction gets a prefix: the old page is overwritten, so the
    // entry fails.
    memory.write(0xb008, 0x2000 | table).unwrap();
    memory.write_slice(0x2000, &[0x48, 0x0f, 0xa2]).unwrap();
    memory.write_slice(CODE, &[0x90, 0x90]).unwrap();
    assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1003));
    // In the same page: without prefix, with one, across words, across pages, another
    // instruction.
    memory.write_slice(0x2005, &[0x0f, 0xa2, 0x0f, 0xa2, 0xf3, 0x0f, 0xa2]).unwrap();
    for (offset, length) in [(5, 2), (7, 2), (9, 3), (0xfff, 2)] {
        memory.write_slice(0x2fff, &[0x0f]).unwrap();
        memory.write(0xb010, 0x5000 | table).unwrap();
        memory.write_slice(0x5000, &[0xa2]).unwrap();
        vcpu.set(Reg::Rip, 0x1000 + offset);
        assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1000 + offset + length));
    }
    vcpu.set(Reg::Rip, 0x1020);
    assert_eq!(next(&mut cache, &mut vcpu, memory), None);
    // The same address in a 32-bit code segment is elsewhere: at its base.
    memory.write_slice(0x5005, &[0x66, 0x0f, 0xa2]).unwrap();
    vcpu.set(Reg::Rip, 0x1005);
    let code = vcpu.segment(Seg::Cs);
    vcpu.set_segment(Seg::Cs, Segment { attrib: 0xc9b, base: 0x1000, ..code });
    assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1008));
    vcpu.set_segment(Seg::Cs, code);
    assert_eq!(next(&mut cache, &mut vcpu, memory), Some(0x1007));
    // Another address space: not the same entry. A missing table, or one outside memory.
    for root in [0xc000, 1 << 40] {
        vcpu.set(Reg::Cr3, root);
        assert_eq!(next(&mut cache, &mut vcpu, memory), None);
    }
}

#[test]
fn code_is_found_in_pages_of_every_size() {
    use crate::walk::locate_64_bit;
    use hw_x86::paging::entry;
    let memory = &TestPlatform::new().memory;
    let mut vcpu = ScriptedVcpu::long(0x8000);
    let table = entry::PRESENT | entry::WRITE;
    let large = table | entry::LARGE;
    let entries = [
        (0x8000, 0x9000 | table),
        (0x8ff8, 0x9000 | table | entry::NX),
        (0x9000, 0xa000 | table),
        (0x9008, 0x4000_0000 | large),
        (0xa000, 0xb000 | table),
        (0xa008, 0x20_0000 | large | 1 << 12),
        (0xb008, 0x7000 | table),
    ];
    for (at, value) in entries {
        memory.write(at, value).unwrap();
    }
    for linear in [0x1234, 0x20_1234, 0x4012_3456, 0x2000, 0x40_0000, 0x80_0000_0000, 0x0123] {
        let expected =
            paging(&mut vcpu).translate(&GuestTables(memory), linear, Intent::Fetch, false);
        let found = locate_64_bit(memory, 0x8000, linear);
        assert_eq!(found, expected.ok().map(|found| found.address), "{linear:#x}");
    }
    // Execute rights are not checked: the CPU did execute.
    assert_eq!(locate_64_bit(memory, 0x8fff, 0xffff_ff80_0000_1fff), Some(0x7fff));
}

#[test]
fn msrs() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    let mut access =
        |vcpu: &mut ScriptedVcpu, platform: &mut TestPlatform, msr, value: Option<u64>| match value
        {
            Some(value) => cpu.write_msr(vcpu, platform, msr, value).map(|()| value),
            None => cpu.read_msr(vcpu, platform, msr),
        };
    // Registers of the back end, storage, constants, refused values.
    let cases: &[(u32, u64, bool)] = &[
        (0xc000_0082, 0xffff_8000_0000_1000, true),
        (0x277, 0x0007_0406_0007_0406, true),
        (0x277, 0x0207_0406_0007_0406, false),
        (0x2ff, 0xc06, true),
        (0x2ff, 0xc02, false),
        (0x200, 0xe000_0000, true),
        (0x200, 1 << 50, false),
        (0xc000_0080, 0xd01, true),
        (0xc000_0080, 0x1d01, false), // SVME
        (0xc000_0101, 1 << 62, false),
        (0xc000_0082, 1 << 47, false),
        (0xc000_0083, 1 << 62, false),
        (0xc000_0102, 1 << 62, false),
        (0x175, 1 << 62, false),
        (0x176, 1 << 62, false),
        (0xc001_0015, 1 << 24 | 1 << 8, true),
        (0x1234, 0, false),
    ];
    for &(msr, value, good) in cases {
        let done = access(&mut vcpu, &mut platform, msr, Some(value));
        assert_eq!(done.is_some(), good, "MSR {msr:#x} = {value:#x}");
        if good && msr != 0xc000_0080 {
            assert_eq!(access(&mut vcpu, &mut platform, msr, None), Some(value), "MSR {msr:#x}");
        }
    }
    assert_eq!(platform.unknown.len(), 11);
    assert_eq!(vcpu.get(Reg::Lstar), 0xffff_8000_0000_1000);
    assert_eq!(access(&mut vcpu, &mut platform, 0x1234, None), None);
    assert_eq!(access(&mut vcpu, &mut platform, 0x1b, None), Some(0x55));
    // The time-stamp counter.
    platform.tsc = 9000;
    access(&mut vcpu, &mut platform, 0x10, Some(0));
    assert_eq!(
        (vcpu.get(Reg::TscOffset), &platform.tsc_written[..]),
        (9000_u64.wrapping_neg(), &[0][..])
    );
    platform.tsc = 9500;
    assert_eq!(access(&mut vcpu, &mut platform, 0x10, None), Some(500));
    // The paravirtual clock: version even, TSC, time, 1 ns per tick.
    access(&mut vcpu, &mut platform, 0x4b56_4d01, Some(0x2001));
    let word = |at| platform.memory.read::<u64>(at).unwrap();
    assert_eq!([word(0x2000), word(0x2008), word(0x2010)], [2, 500, 8500]);
    assert_eq!(word(0x2018), 0x8000_0000 | 1 << 32 | 1 << 40);
    access(&mut vcpu, &mut platform, 0x4b56_4d00, Some(0x3000));
    assert_eq!(platform.memory.read::<u64>(0x3000), Ok(1_700_000_000 << 32 | 2));
    // Outside memory: refused and reported, no other effect.
    assert_eq!(access(&mut vcpu, &mut platform, 0x4b56_4d00, Some(1 << 40)), None);
}

#[test]
fn ports_keep_the_rest_of_rax() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    let io = |port, size, write| {
        let next_rip = CODE + 1;
        Exit::Io(IoExit { port, size, write, string: false, rep: false, next_rip })
    };
    vcpu.set_gpr(Gpr::Rax, 0x1122_3344_5566_7788);
    vcpu.then(move |_| io(0x80, 1, true));
    vcpu.then(move |_| io(0x60, 1, false));
    vcpu.then(move |vcpu| {
        assert_eq!(vcpu.gpr(Gpr::Rax), 0x1122_3344_5566_77ff);
        io(0x60, 4, false)
    });
    play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(vcpu.gpr(Gpr::Rax), 0xffff_ffff);
    assert_eq!(platform.ports, [(0x80, 1, 0x88), (0x60, 1, 0), (0x60, 4, 0)]);
}

#[test]
fn xcr0() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0x01, 0xd1]);
    vcpu.set_gpr(Gpr::Rax, 7);
    vcpu.then(|_| Exit::Xsetbv);
    vcpu.then(|vcpu| {
        assert_eq!((vcpu.get(Reg::Xcr0), vcpu.get(Reg::Rip)), (7, CODE + 3));
        vcpu.set(Reg::Rip, CODE);
        vcpu.set_gpr(Gpr::Rax, 5); // AVX without SSE
        Exit::Xsetbv
    });
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(entries[2].0, PROTECTION);
}

#[test]
fn user_mode_does_not_set_xcr0() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x0f, 0x01, 0xd1]);
    vcpu.set(Reg::Cpl, 3);
    vcpu.set_gpr(Gpr::Rax, 7);
    vcpu.then(|_| Exit::Xsetbv);
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(entries[1].0, PROTECTION);
    assert_eq!((vcpu.get(Reg::Xcr0), vcpu.get(Reg::Rip)), (1, CODE), "as after the reset");
}

#[test]
fn ends() {
    let cases = [
        (Exit::Shutdown, Outcome::TripleFault),
        (Exit::InvalidState { why: "no", code: 1 }, Outcome::TripleFault),
        (Exit::HostError(5), Outcome::HostError(5)),
        (Exit::Unknown(0x99), Outcome::HostError(0x99)),
    ];
    for (exit, outcome) in cases {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        vcpu.then(move |_| exit);
        assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(outcome));
    }
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    platform.end = Some(Outcome::PowerOff);
    assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(Outcome::PowerOff));
}
