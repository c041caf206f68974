//! Kinds of sites.

macro_rules! kinds {
    ($($kind:ident $name:literal $text:literal),* $(,)?) => {
        /// The operation of a site's instruction. The numbers, in this order from 0, are part of
        /// the format: the list only grows at its end.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum Kind {
            $(#[doc = $text] $kind),*
        }

        impl Kind {
            /// All kinds, by number.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// The name in tables and reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name),*
                }
            }
        }
    };
}

kinds! {
    Cli "cli" "`cli`.",
    Sti "sti" "`sti`.",
    Hlt "hlt" "`hlt`.",
    StiHlt "sti_hlt" "`sti; hlt`.",
    StiMwait "sti_mwait" "`sti; mwait`.",
    SaveFlags "save_fl" "`pushf; pop`.",
    RestoreFlags "restore_fl" "`push; popf`.",
    Pushf "pushf" "`pushf` alone.",
    Popf "popf" "`popf` alone.",
    In "in" "`in`.",
    Out "out" "`out`.",
    Ins "ins" "`ins`, with its prefix.",
    Outs "outs" "`outs`, with its prefix.",
    ReadControl "rd_cr" "`mov` from a control register.",
    WriteControl "wr_cr" "`mov` to a control register.",
    ReadDebug "rd_dr" "`mov` from a debug register.",
    WriteDebug "wr_dr" "`mov` to a debug register.",
    Rdmsr "rdmsr" "`rdmsr`.",
    Wrmsr "wrmsr" "`wrmsr`.",
    Lgdt "lgdt" "`lgdt`.",
    Lidt "lidt" "`lidt`.",
    Sgdt "sgdt" "`sgdt`.",
    Sidt "sidt" "`sidt`.",
    Lldt "lldt" "`lldt`.",
    Sldt "sldt" "`sldt`.",
    Ltr "ltr" "`ltr`.",
    Str "str" "`str`.",
    Smsw "smsw" "`smsw`.",
    Lmsw "lmsw" "`lmsw`.",
    Clts "clts" "`clts`.",
    Invlpg "invlpg" "`invlpg`.",
    Invpcid "invpcid" "`invpcid`.",
    Wbinvd "wbinvd" "`wbinvd`.",
    Wbnoinvd "wbnoinvd" "`wbnoinvd`.",
    Invd "invd" "`invd`.",
    Iret "iret" "`iret`, of any operand size.",
    Sysretq "sysretq" "`sysret` to 64-bit code.",
    Sysretl "sysretl" "`sysret` to 32-bit code.",
    Sysexit "sysexit" "`sysexit`.",
    Swapgs "swapgs" "`swapgs`.",
    ReadSegment "rd_seg" "`mov` from a segment register.",
    WriteSegment "wr_seg" "`mov` to a segment register, also `lfs`, `lgs`, `lss`.",
    PushSegment "push_seg" "`push` of a segment register.",
    PopSegment "pop_seg" "`pop` of a segment register.",
    FarReturn "lret" "Far return.",
    FarJump "ljmp" "Far jump.",
    FarCall "lcall" "Far call.",
    Cpuid "cpuid" "`cpuid`.",
    Rdpmc "rdpmc" "`rdpmc`.",
    Xsetbv "xsetbv" "`xsetbv`.",
    Stac "stac" "`stac`.",
    Clac "clac" "`clac`.",
    Monitor "monitor" "`monitor`.",
    Mwait "mwait" "`mwait`.",
    Lar "lar" "`lar`.",
    Lsl "lsl" "`lsl`.",
    Verr "verr" "`verr`.",
    Verw "verw" "`verw`.",
    Int "int" "`int n`.",
    Xsaves "xsaves" "`xsaves`.",
    Xrstors "xrstors" "`xrstors`.",
    Vmcall "vmcall" "`vmcall`.",
    Vmmcall "vmmcall" "`vmmcall`.",
    Encls "encls" "`encls`.",
    Monitorx "monitorx" "`monitorx`.",
    Mwaitx "mwaitx" "`mwaitx`.",
    Other "other" "A privileged instruction without a kind of its own: the reader decodes it.",
    PageTable "pgtable" "A store to a page table.",
    Announce "announce" "No instruction: here RDI and RSI are start and end of the site table of a module just loaded.",
    Retract "retract" "No instruction: as `announce`, of a module that is about to be unloaded.",
}

impl Kind {
    /// The kind's number in a record.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The kind with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// Returns true if the site has no instruction, only a pad.
    pub const fn is_marker(self) -> bool {
        matches!(self, Self::Announce | Self::Retract)
    }

    /// Returns true if the site is two instructions that form one unit.
    pub const fn is_pair(self) -> bool {
        matches!(self, Self::StiHlt | Self::StiMwait | Self::SaveFlags | Self::RestoreFlags)
    }

    /// Returns true if the instruction faults in user mode (with I/O privilege level 0), so that it
    /// can be emulated without having been rewritten (APM vol. 3).
    pub const fn traps(self) -> bool {
        !matches!(
            self,
            Self::SaveFlags
                | Self::RestoreFlags
                | Self::Pushf
                | Self::Popf
                | Self::Sgdt
                | Self::Sidt
                | Self::Sldt
                | Self::Str
                | Self::Smsw
                | Self::Iret
                | Self::ReadSegment
                | Self::WriteSegment
                | Self::PushSegment
                | Self::PopSegment
                | Self::FarReturn
                | Self::FarJump
                | Self::FarCall
                | Self::Cpuid
                | Self::Lar
                | Self::Lsl
                | Self::Verr
                | Self::Verw
                | Self::Int
                | Self::Other
                | Self::PageTable
                | Self::Announce
                | Self::Retract
        )
    }
}
