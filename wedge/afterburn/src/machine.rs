//! Classifies decoded instructions by the same list as [`crate::mnemonics`]. The verifier finds
//! here the instructions that the rewriter overlooks in text.

use iced_x86::Mnemonic as M;
use iced_x86::{Code, Instruction, OpKind, Register};
use wedge_sites::Kind;

/// A segment override that 64-bit mode ignores (APM vol. 3, 1.2.4): pads before instructions
/// consist of it.
pub const CS: u8 = 0x2e;

/// Instructions that are sensitive with all operands, and their kinds.
const SENSITIVE: &[(M, Kind)] = &[
    (M::Cli, Kind::Cli),
    (M::Sti, Kind::Sti),
    (M::Hlt, Kind::Hlt),
    (M::Pushf, Kind::Pushf),
    (M::Pushfd, Kind::Pushf),
    (M::Pushfq, Kind::Pushf),
    (M::Popf, Kind::Popf),
    (M::Popfd, Kind::Popf),
    (M::Popfq, Kind::Popf),
    (M::In, Kind::In),
    (M::Out, Kind::Out),
    (M::Insb, Kind::Ins),
    (M::Insw, Kind::Ins),
    (M::Insd, Kind::Ins),
    (M::Outsb, Kind::Outs),
    (M::Outsw, Kind::Outs),
    (M::Outsd, Kind::Outs),
    (M::Rdmsr, Kind::Rdmsr),
    (M::Wrmsr, Kind::Wrmsr),
    (M::Lgdt, Kind::Lgdt),
    (M::Lidt, Kind::Lidt),
    (M::Sgdt, Kind::Sgdt),
    (M::Sidt, Kind::Sidt),
    (M::Lldt, Kind::Lldt),
    (M::Sldt, Kind::Sldt),
    (M::Ltr, Kind::Ltr),
    (M::Str, Kind::Str),
    (M::Smsw, Kind::Smsw),
    (M::Lmsw, Kind::Lmsw),
    (M::Clts, Kind::Clts),
    (M::Invlpg, Kind::Invlpg),
    (M::Invpcid, Kind::Invpcid),
    (M::Wbinvd, Kind::Wbinvd),
    (M::Wbnoinvd, Kind::Wbnoinvd),
    (M::Invd, Kind::Invd),
    (M::Iret, Kind::Iret),
    (M::Iretd, Kind::Iret),
    (M::Iretq, Kind::Iret),
    (M::Sysretq, Kind::Sysretq),
    (M::Sysret, Kind::Sysretl),
    (M::Sysexit, Kind::Sysexit),
    (M::Sysexitq, Kind::Sysexit),
    (M::Swapgs, Kind::Swapgs),
    (M::Lfs, Kind::WriteSegment),
    (M::Lgs, Kind::WriteSegment),
    (M::Lss, Kind::WriteSegment),
    (M::Retf, Kind::FarReturn),
    (M::Cpuid, Kind::Cpuid),
    (M::Rdpmc, Kind::Rdpmc),
    (M::Xsetbv, Kind::Xsetbv),
    (M::Stac, Kind::Stac),
    (M::Clac, Kind::Clac),
    (M::Monitor, Kind::Monitor),
    (M::Mwait, Kind::Mwait),
    (M::Lar, Kind::Lar),
    (M::Lsl, Kind::Lsl),
    (M::Verr, Kind::Verr),
    (M::Verw, Kind::Verw),
    (M::Xsaves, Kind::Xsaves),
    (M::Xsaves64, Kind::Xsaves),
    (M::Xrstors, Kind::Xrstors),
    (M::Xrstors64, Kind::Xrstors),
    (M::Vmcall, Kind::Vmcall),
    (M::Vmmcall, Kind::Vmmcall),
    (M::Encls, Kind::Encls),
    (M::Monitorx, Kind::Monitorx),
    (M::Mwaitx, Kind::Mwaitx),
];

/// Instructions that are sensitive with all operands, of [`Kind::Other`].
const OTHER: &[M] = &[
    M::Clgi,
    M::Clrssbsy,
    M::Enclv,
    M::Erets,
    M::Eretu,
    M::Getsec,
    M::Hreset,
    M::Invept,
    M::Invlpga,
    M::Invlpgb,
    M::Invvpid,
    M::Lkgs,
    M::Loadiwkey,
    M::Mcommit,
    M::Pconfig,
    M::Psmash,
    M::Pvalidate,
    M::Rdmsrlist,
    M::Rmpadjust,
    M::Rmpquery,
    M::Rmpupdate,
    M::Rsm,
    M::Seamcall,
    M::Seamops,
    M::Seamret,
    M::Setssbsy,
    M::Skinit,
    M::Stgi,
    M::Tdcall,
    M::Tlbsync,
    M::Vmclear,
    M::Vmfunc,
    M::Vmgexit,
    M::Vmlaunch,
    M::Vmload,
    M::Vmptrld,
    M::Vmptrst,
    M::Vmread,
    M::Vmresume,
    M::Vmrun,
    M::Vmsave,
    M::Vmwrite,
    M::Vmxoff,
    M::Vmxon,
    M::Wrmsrlist,
    M::Wrmsrns,
    M::Wrussd,
    M::Wrussq,
];

/// Kinds of [`SENSITIVE`] and [`OTHER`], by mnemonic.
static KINDS: [Option<Kind>; 2048] = {
    let mut kinds = [None; 2048];
    let mut index = 0;
    while index < SENSITIVE.len() {
        let (mnemonic, kind) = SENSITIVE[index];
        kinds[mnemonic as usize] = Some(kind);
        index += 1;
    }
    index = 0;
    while index < OTHER.len() {
        kinds[OTHER[index] as usize] = Some(Kind::Other);
        index += 1;
    }
    kinds
};

/// The kind of a sensitive instruction of 64-bit code; `None` for any other instruction.
pub fn kind(instruction: &Instruction) -> Option<Kind> {
    if let Some(kind) = KINDS.get(instruction.mnemonic() as usize).copied().flatten() {
        return Some(kind);
    }
    match (instruction.mnemonic(), instruction.code()) {
        (M::Int, Code::Int_imm8) => Some(Kind::Int),
        (M::Jmp, Code::Jmp_m1616 | Code::Jmp_m1632 | Code::Jmp_m1664) => Some(Kind::FarJump),
        (M::Call, Code::Call_m1616 | Code::Call_m1632 | Code::Call_m1664) => Some(Kind::FarCall),
        (M::Mov, _) => moved(instruction),
        (M::Push, _) if segment(instruction, 0) => Some(Kind::PushSegment),
        (M::Pop, _) if segment(instruction, 0) => Some(Kind::PopSegment),
        _ => None,
    }
}

/// The kind of two adjacent instructions that form one site.
pub fn pair(first: &Instruction, second: &Instruction) -> Option<Kind> {
    Some(match (first.mnemonic(), second.mnemonic()) {
        (M::Sti, M::Hlt) => Kind::StiHlt,
        (M::Sti, M::Mwait) => Kind::StiMwait,
        (M::Pushf | M::Pushfq, M::Pop) => Kind::SaveFlags,
        (M::Push, M::Popf | M::Popfq) => Kind::RestoreFlags,
        _ => return None,
    })
}

fn moved(instruction: &Instruction) -> Option<Kind> {
    let register = |operand| match instruction.op_kind(operand) {
        OpKind::Register => instruction.op_register(operand),
        _ => Register::None,
    };
    let (to, from) = (register(0), register(1));
    Some(if from.is_cr() {
        Kind::ReadControl
    } else if to.is_cr() {
        Kind::WriteControl
    } else if from.is_dr() {
        Kind::ReadDebug
    } else if to.is_dr() {
        Kind::WriteDebug
    } else if from.is_segment_register() {
        Kind::ReadSegment
    } else if to.is_segment_register() {
        Kind::WriteSegment
    } else {
        return None;
    })
}

fn segment(instruction: &Instruction, operand: u32) -> bool {
    instruction.op_kind(operand) == OpKind::Register
        && instruction.op_register(operand).is_segment_register()
}
