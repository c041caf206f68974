//! Classifies instructions in assembler text by mnemonic and operands: AT&T syntax, 64-bit mode.
//!
//! Sensitive instructions are privileged, behave differently without privilege (`popf`), or reveal
//! to a guest that it is virtualized (`sgdt`, `cpuid`, segment registers): AMD64 APM vol. 3
//! (24594), chapters 3 and 4; for VMX and others SDM vol. 2. Time stamps, protection keys and the
//! base registers of FS and GS are not in the list: if the operating system allows them in user
//! mode, they behave there as in the kernel.

use wedge_sites::Kind;

/// The class of an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// A sensitive instruction.
    Sensitive(Kind),
    /// A prefix without its instruction.
    Prefix,
    /// `pop` that may stand after `pushf`.
    Pop,
    /// `push` that may stand before `popf`.
    Push,
    /// Reads the arithmetic flags.
    ReadsFlags,
    /// Sets all arithmetic flags, or leaves the function in a way that loses them.
    EndsFlags,
    /// None of these.
    Other,
}

/// Mnemonics that are sensitive with any operands.
const SENSITIVE: &[(&str, Kind)] = &[
    ("cli", Kind::Cli),
    ("sti", Kind::Sti),
    ("hlt", Kind::Hlt),
    ("pushf", Kind::Pushf),
    ("pushfq", Kind::Pushf),
    ("pushfw", Kind::Pushf),
    ("popf", Kind::Popf),
    ("popfq", Kind::Popf),
    ("popfw", Kind::Popf),
    ("in", Kind::In),
    ("inb", Kind::In),
    ("inw", Kind::In),
    ("inl", Kind::In),
    ("out", Kind::Out),
    ("outb", Kind::Out),
    ("outw", Kind::Out),
    ("outl", Kind::Out),
    ("ins", Kind::Ins),
    ("insb", Kind::Ins),
    ("insw", Kind::Ins),
    ("insl", Kind::Ins),
    ("outs", Kind::Outs),
    ("outsb", Kind::Outs),
    ("outsw", Kind::Outs),
    ("outsl", Kind::Outs),
    ("rdmsr", Kind::Rdmsr),
    ("wrmsr", Kind::Wrmsr),
    ("lgdt", Kind::Lgdt),
    ("lgdtq", Kind::Lgdt),
    ("lidt", Kind::Lidt),
    ("lidtq", Kind::Lidt),
    ("sgdt", Kind::Sgdt),
    ("sgdtq", Kind::Sgdt),
    ("sidt", Kind::Sidt),
    ("sidtq", Kind::Sidt),
    ("lldt", Kind::Lldt),
    ("lldtw", Kind::Lldt),
    ("sldt", Kind::Sldt),
    ("sldtw", Kind::Sldt),
    ("sldtl", Kind::Sldt),
    ("sldtq", Kind::Sldt),
    ("ltr", Kind::Ltr),
    ("ltrw", Kind::Ltr),
    ("str", Kind::Str),
    ("strw", Kind::Str),
    ("strl", Kind::Str),
    ("strq", Kind::Str),
    ("smsw", Kind::Smsw),
    ("smsww", Kind::Smsw),
    ("smswl", Kind::Smsw),
    ("smswq", Kind::Smsw),
    ("lmsw", Kind::Lmsw),
    ("lmsww", Kind::Lmsw),
    ("clts", Kind::Clts),
    ("invlpg", Kind::Invlpg),
    ("invpcid", Kind::Invpcid),
    ("wbinvd", Kind::Wbinvd),
    ("wbnoinvd", Kind::Wbnoinvd),
    ("invd", Kind::Invd),
    ("iret", Kind::Iret),
    ("iretw", Kind::Iret),
    ("iretl", Kind::Iret),
    ("iretq", Kind::Iret),
    ("sysretq", Kind::Sysretq),
    // Without a suffix the assembler takes 32 bits, with a warning.
    ("sysret", Kind::Sysretl),
    ("sysretl", Kind::Sysretl),
    ("sysexit", Kind::Sysexit),
    ("sysexitl", Kind::Sysexit),
    ("sysexitq", Kind::Sysexit),
    ("swapgs", Kind::Swapgs),
    ("lfs", Kind::WriteSegment),
    ("lgs", Kind::WriteSegment),
    ("lss", Kind::WriteSegment),
    ("lfsw", Kind::WriteSegment),
    ("lgsw", Kind::WriteSegment),
    ("lssw", Kind::WriteSegment),
    ("lfsl", Kind::WriteSegment),
    ("lgsl", Kind::WriteSegment),
    ("lssl", Kind::WriteSegment),
    ("lfsq", Kind::WriteSegment),
    ("lgsq", Kind::WriteSegment),
    ("lssq", Kind::WriteSegment),
    ("lret", Kind::FarReturn),
    ("lretw", Kind::FarReturn),
    ("lretl", Kind::FarReturn),
    ("lretq", Kind::FarReturn),
    ("retf", Kind::FarReturn),
    ("retfq", Kind::FarReturn),
    ("ljmp", Kind::FarJump),
    ("ljmpw", Kind::FarJump),
    ("ljmpl", Kind::FarJump),
    ("ljmpq", Kind::FarJump),
    ("lcall", Kind::FarCall),
    ("lcallw", Kind::FarCall),
    ("lcalll", Kind::FarCall),
    ("lcallq", Kind::FarCall),
    ("cpuid", Kind::Cpuid),
    ("rdpmc", Kind::Rdpmc),
    ("xsetbv", Kind::Xsetbv),
    ("stac", Kind::Stac),
    ("clac", Kind::Clac),
    ("monitor", Kind::Monitor),
    ("mwait", Kind::Mwait),
    ("lar", Kind::Lar),
    ("larw", Kind::Lar),
    ("larl", Kind::Lar),
    ("larq", Kind::Lar),
    ("lsl", Kind::Lsl),
    ("lslw", Kind::Lsl),
    ("lsll", Kind::Lsl),
    ("lslq", Kind::Lsl),
    ("verr", Kind::Verr),
    ("verrw", Kind::Verr),
    ("verw", Kind::Verw),
    ("verww", Kind::Verw),
    ("xsaves", Kind::Xsaves),
    ("xsaves64", Kind::Xsaves),
    ("xrstors", Kind::Xrstors),
    ("xrstors64", Kind::Xrstors),
    ("vmcall", Kind::Vmcall),
    ("vmmcall", Kind::Vmmcall),
    ("encls", Kind::Encls),
    ("monitorx", Kind::Monitorx),
    ("mwaitx", Kind::Mwaitx),
    ("clgi", Kind::Other),
    ("clrssbsy", Kind::Other),
    ("enclv", Kind::Other),
    ("erets", Kind::Other),
    ("eretu", Kind::Other),
    ("getsec", Kind::Other),
    ("hreset", Kind::Other),
    ("invept", Kind::Other),
    ("invlpga", Kind::Other),
    ("invlpgb", Kind::Other),
    ("invvpid", Kind::Other),
    ("lkgs", Kind::Other),
    ("loadiwkey", Kind::Other),
    ("mcommit", Kind::Other),
    ("pconfig", Kind::Other),
    ("psmash", Kind::Other),
    ("pvalidate", Kind::Other),
    ("rdmsrlist", Kind::Other),
    ("rmpadjust", Kind::Other),
    ("rmpquery", Kind::Other),
    ("rmpupdate", Kind::Other),
    ("rsm", Kind::Other),
    ("seamcall", Kind::Other),
    ("seamops", Kind::Other),
    ("seamret", Kind::Other),
    ("setssbsy", Kind::Other),
    ("skinit", Kind::Other),
    ("stgi", Kind::Other),
    ("tdcall", Kind::Other),
    ("tlbsync", Kind::Other),
    ("vmclear", Kind::Other),
    ("vmfunc", Kind::Other),
    ("vmgexit", Kind::Other),
    ("vmlaunch", Kind::Other),
    ("vmload", Kind::Other),
    ("vmptrld", Kind::Other),
    ("vmptrst", Kind::Other),
    ("vmread", Kind::Other),
    ("vmreadq", Kind::Other),
    ("vmresume", Kind::Other),
    ("vmrun", Kind::Other),
    ("vmsave", Kind::Other),
    ("vmwrite", Kind::Other),
    ("vmwriteq", Kind::Other),
    ("vmxoff", Kind::Other),
    ("vmxon", Kind::Other),
    ("wrmsrlist", Kind::Other),
    ("wrmsrns", Kind::Other),
    ("wrussd", Kind::Other),
    ("wrussq", Kind::Other),
];

/// Mnemonics that are sensitive with any operands.
pub fn sensitive() -> impl Iterator<Item = (&'static str, Kind)> {
    SENSITIVE.iter().copied()
}

/// Length of the longest mnemonic in the table.
const LONGEST: usize = 10;

/// Bit set of first letter pairs in `SENSITIVE`, so that most mnemonics need no comparison.
struct Index {
    /// Entry `first letter` has bit `second letter` set.
    pairs: [u32; 26],
}

const INDEX: Index = {
    let mut pairs = [0; 26];
    let mut at = 0;
    while at < SENSITIVE.len() {
        let name = SENSITIVE[at].0.as_bytes();
        pairs[(name[0] - b'a') as usize] |= 1 << (name[1] - b'a');
        at += 1;
    }
    Index { pairs }
};

impl Index {
    fn has(&self, name: &[u8]) -> bool {
        match name {
            [first @ b'a'..=b'z', second @ b'a'..=b'z', ..] => {
                self.pairs[usize::from(first - b'a')] & 1 << (second - b'a') != 0
            }
            _ => false,
        }
    }
}

/// The kind of a mnemonic that is sensitive with any operands; any case.
pub fn always_sensitive(mnemonic: &[u8]) -> Option<Kind> {
    if mnemonic.len() > LONGEST {
        return None;
    }
    let mut buffer = [0; LONGEST];
    let name = lower(mnemonic, &mut buffer);
    if !INDEX.has(name) {
        return None;
    }
    SENSITIVE.iter().find(|(known, _)| known.as_bytes() == name).map(|&(_, kind)| kind)
}

/// Sensitive mnemonics with this start and end and at least one character between.
pub fn completions<'t>(
    begin: &'t [u8],
    end: &'t [u8],
) -> impl Iterator<Item = (&'static str, Kind)> + 't {
    sensitive().filter(move |(name, _)| {
        let name = name.as_bytes();
        name.len() > begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
    })
}

fn lower<'a>(name: &[u8], buffer: &'a mut [u8; LONGEST]) -> &'a [u8] {
    for (to, from) in buffer.iter_mut().zip(name) {
        *to = from.to_ascii_lowercase();
    }
    &buffer[..name.len()]
}

/// The class of an instruction. `operands` has no comments.
pub fn class(mnemonic: &[u8], operands: &[u8]) -> Class {
    if mnemonic.len() > LONGEST {
        return Class::Other;
    }
    let mut buffer = [0; LONGEST];
    let name = lower(mnemonic, &mut buffer);
    if let Some(kind) = always_sensitive(name) {
        return Class::Sensitive(kind);
    }
    match name {
        b"mov" | b"movq" | b"movl" | b"movw" | b"movabs" => moved(operands),
        b"push" | b"pushq" | b"pushw" => match segment(operands) {
            true => Class::Sensitive(Kind::PushSegment),
            false => Class::Push,
        },
        b"pop" | b"popq" | b"popw" => match segment(operands) {
            true => Class::Sensitive(Kind::PopSegment),
            false => Class::Pop,
        },
        // `int $3` is a byte of its own, the breakpoint.
        b"int" => match operands {
            b"$3" | b"$0x3" | b"$0x03" => Class::Other,
            _ => Class::Sensitive(Kind::Int),
        },
        _ if is_prefix(name) => Class::Prefix,
        _ => flags(name),
    }
}

/// `mov` with a control, debug or segment register.
fn moved(operands: &[u8]) -> Class {
    // Most operands have none of these registers.
    if !operands.windows(2).any(|pair| {
        pair[0] == b'%' && matches!(pair[1].to_ascii_lowercase(), b'c'..=b'g' | b's' | b' ' | b'\t')
    }) {
        return Class::Other;
    }
    let mut list = operand_list(operands);
    let (Some(from), Some(to), None) = (list.next(), list.next(), list.next()) else {
        return Class::Other;
    };
    let kind = if numbered(from, b"cr") {
        Kind::ReadControl
    } else if numbered(to, b"cr") {
        Kind::WriteControl
    } else if numbered(from, b"dr") || numbered(from, b"db") {
        Kind::ReadDebug
    } else if numbered(to, b"dr") || numbered(to, b"db") {
        Kind::WriteDebug
    } else if segment(from) {
        Kind::ReadSegment
    } else if segment(to) {
        Kind::WriteSegment
    } else {
        return Class::Other;
    };
    Class::Sensitive(kind)
}

/// Splits operands at commas outside parentheses.
pub fn operand_list(operands: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut depth = 0_u32;
    operands
        .split(move |&byte| {
            match byte {
                b'(' => depth += 1,
                b')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            byte == b',' && depth == 0
        })
        .map(|operand| operand.trim_ascii())
}

/// A register's name, without `%`.
fn register(operand: &[u8]) -> Option<&[u8]> {
    let name = operand.trim_ascii().strip_prefix(b"%")?;
    Some(name.trim_ascii_start())
}

fn segment(operand: &[u8]) -> bool {
    register(operand).is_some_and(is_segment)
}

fn is_segment(name: &[u8]) -> bool {
    matches!(name, [a, b] if matches!(a | 0x20, b'c'..=b'g' | b's') && b | 0x20 == b's')
}

fn numbered(operand: &[u8], prefix: &[u8; 2]) -> bool {
    register(operand).is_some_and(|name| is_numbered(name, prefix))
}

fn is_numbered(name: &[u8], prefix: &[u8; 2]) -> bool {
    match name {
        [a, b, digits @ ..] => {
            [a | 0x20, b | 0x20] == *prefix // The number may come from a macro's argument.
                && matches!(digits, [b'0'..=b'9'] | [b'1', b'0'..=b'5'] | [b'\\', ..])
        }
        _ => false,
    }
}

/// Returns true if this name, alone or after `%`, is a register that makes `mov`, `push` or `pop`
/// sensitive.
pub fn is_sensitive_register(text: &[u8]) -> bool {
    let name = text.strip_prefix(b"%").unwrap_or(text);
    is_segment(name) || [b"cr", b"dr", b"db"].iter().any(|prefix| is_numbered(name, prefix))
}

/// Prefixes that may stand before their instruction, or in a statement of their own.
fn is_prefix(name: &[u8]) -> bool {
    matches!(
        name,
        b"rep"
            | b"repe"
            | b"repz"
            | b"repne"
            | b"repnz"
            | b"lock"
            | b"cs"
            | b"ds"
            | b"es"
            | b"fs"
            | b"gs"
            | b"ss"
            | b"data16"
            | b"data32"
            | b"addr16"
            | b"addr32"
            | b"word"
            | b"adword"
            | b"ht"
            | b"hnt"
            | b"notrack"
            | b"bnd"
            | b"xacquire"
            | b"xrelease"
    ) || is_rex(name)
}

/// REX prefixes: `rex`, `rex.wrxb`, and the old `rex64xyz`.
fn is_rex(name: &[u8]) -> bool {
    let bits = name.strip_prefix(b"rex");
    bits.is_some_and(|bits| bits.iter().all(|bit| b".wrxb64yz".contains(bit)))
}

/// Returns true for an instruction that the assembler treats as a prefix.
pub fn is_wait(name: &[u8]) -> bool {
    name.eq_ignore_ascii_case(b"wait") || name.eq_ignore_ascii_case(b"fwait")
}

/// Returns true if some instruction of this mnemonic is sensitive, or if it is a prefix of one.
pub fn may_be_sensitive(name: &[u8]) -> bool {
    let name = name.to_ascii_lowercase();
    [&b""[..], b"%cr0,%rax", b"%ds"]
        .iter()
        .any(|operands| matches!(class(&name, operands), Class::Sensitive(_) | Class::Prefix))
        || is_wait(&name)
}

/// Conservative: an instruction that is not known to overwrite the flags is assumed to keep them.
fn flags(name: &[u8]) -> Class {
    match name {
        b"jmp" | b"jmpq" | b"call" | b"callq" | b"ret" | b"retq" => Class::EndsFlags,
        b"adc" | b"adcb" | b"adcw" | b"adcl" | b"adcq" | b"sbb" | b"sbbb" | b"sbbw" | b"sbbl"
        | b"sbbq" | b"cmc" | b"lahf" => Class::ReadsFlags,
        _ if [b"rcl", b"rcr", b"set"].iter().any(|prefix| name.starts_with(*prefix)) => {
            Class::ReadsFlags
        }
        _ if name.starts_with(b"cmov") || name.starts_with(b"fcmov") || name.starts_with(b"j") => {
            Class::ReadsFlags
        }
        _ => {
            let root = match name {
                [root @ .., b'b' | b'w' | b'l' | b'q'] if root != b"su" => root,
                _ => name,
            };
            match root {
                b"add" | b"sub" | b"cmp" | b"test" | b"and" | b"or" | b"xor" | b"neg" => {
                    Class::EndsFlags
                }
                _ => Class::Other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Class {
        let (mnemonic, operands) = text.split_once(' ').unwrap_or((text, ""));
        class(mnemonic.as_bytes(), operands.trim().as_bytes())
    }

    #[test]
    fn the_table_is_lower_case_and_short_enough() {
        for (name, kind) in sensitive() {
            assert!(name.len() <= LONGEST && name.bytes().all(|byte| !byte.is_ascii_uppercase()));
            assert_eq!(of(name), Class::Sensitive(kind), "{name}");
            assert_eq!(of(&name.to_uppercase()), Class::Sensitive(kind), "{name}");
        }
    }

    #[test]
    fn registers() {
        let sensitive = |text| match of(text) {
            Class::Sensitive(kind) => Some(kind),
            _ => None,
        };
        assert_eq!(sensitive("mov %cr3, %rax"), Some(Kind::ReadControl));
        assert_eq!(sensitive("movq %rax,%cr8"), Some(Kind::WriteControl));
        assert_eq!(sensitive("mov %db7, %rax"), Some(Kind::ReadDebug));
        assert_eq!(sensitive("mov %rax, %DR7"), Some(Kind::WriteDebug));
        assert_eq!(sensitive("movl %ss, 8(%rax,%rbx)"), Some(Kind::ReadSegment));
        assert_eq!(sensitive("movw 8(%rax,%rbx,2), % gs"), Some(Kind::WriteSegment));
        assert_eq!(sensitive("push %fs"), Some(Kind::PushSegment));
        assert_eq!(sensitive("popq %gs"), Some(Kind::PopSegment));
        for harmless in [
            "mov %gs:8, %rax",
            "mov %rax, %cs:(%rdx)",
            "mov %rax, %rdx",
            "movl %edi, %esi",
            "mov %esp, %ds_",
        ] {
            assert_eq!(of(harmless), Class::Other, "{harmless}");
        }
        assert_eq!(of("push %rax"), Class::Push);
        assert_eq!(of("pop %gs:8"), Class::Pop);
    }

    #[test]
    fn the_breakpoint_is_not_sensitive() {
        assert_eq!(of("int3"), Class::Other);
        assert_eq!(of("int $3"), Class::Other);
        assert_eq!(of("int $0x80"), Class::Sensitive(Kind::Int));
    }

    #[test]
    fn flags_after_an_instruction() {
        for reader in ["je 1f", "setc %al", "cmovne %rax, %rdx", "adcq $0, %rax", "sbb %eax, %eax"]
        {
            assert_eq!(of(reader), Class::ReadsFlags, "{reader}");
        }
        for end in ["jmp 1f", "call f", "cmpq $1, %rax", "sub %eax, %eax", "testb %al, %al"] {
            assert_eq!(of(end), Class::EndsFlags, "{end}");
        }
        for other in ["mov %eax, %edx", "lea (%rax), %rdx", "nop"] {
            assert_eq!(of(other), Class::Other, "{other}");
        }
    }

    #[test]
    fn pieces_of_mnemonics() {
        let names = |begin, end| completions(begin, end).map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(b"rd", b""), ["rdmsr", "rdpmc", "rdmsrlist"]);
        assert_eq!(names(b"ou", b"l"), ["outl", "outsl"]);
        assert_eq!(names(b"mov", b""), [""; 0]);
        assert!(is_sensitive_register(b"%cr3") && is_sensitive_register(b"ds"));
        assert!(!is_sensitive_register(b"%rcx") && !is_sensitive_register(b"0"));
    }
}
