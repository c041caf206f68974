//! Systems that the benchmarks run in: columns of the results.

/// Name of the bare machine's column.
pub const NATIVE: &str = "native";
/// Name of the column of KVM's shadow paging.
pub const KVM: &str = "kvm";
/// Name of the column with all optimisations, which the limits apply to.
pub const TOP: &str = "top";
/// Benchmark and test of parallel jobs.
pub const JOBS: &str = "jobs";
/// Frames of each vCPU for shadow tables.
const POOL: &str = "1M";
/// Rung with all optimisations.
const ALL: &str = "invlpga";
/// Numbers of address spaces that are kept, for which parallel jobs are measured with all
/// optimisations: name and title of the column, number. The column `top` keeps 8.
const SPACES: [(&str, &str, u8); 5] = [
    ("spaces1", "all, 1 space", 1),
    ("spaces2", "all, 2 spaces", 2),
    ("spaces4", "all, 4 spaces", 4),
    ("spaces16", "all, 16 spaces", 16),
    ("spaces32", "all, 32 spaces", 32),
];

/// Manner in which guest memory is virtualized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// Not at all: the bare machine.
    None,
    /// KVM's shadow paging.
    Kvm,
    /// Parador with nested paging.
    Nested,
    /// Parador's vTLB up to this optimisation.
    Vtlb {
        /// Key `rung` of the description.
        rung: &'static str,
        /// Writes to page tables are intercepted, as in KVM, instead of found by dirty bits.
        trace_by_write: bool,
        /// Key `vtlb_spaces`; `None`: the default.
        spaces: Option<u8>,
    },
}

/// A system that the benchmarks run in.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Part of the keys of results, and argument of the command.
    pub name: &'static str,
    /// Title for people.
    pub title: &'static str,
    /// Virtualization of memory.
    pub paging: Paging,
    /// Only parallel jobs are measured.
    pub only_jobs: bool,
}

impl Column {
    /// Keys of a VM's description that select this way of paging; empty for nested paging.
    pub fn description(&self) -> String {
        let Paging::Vtlb { rung, trace_by_write, spaces } = self.paging else {
            return String::new();
        };
        let trace = if trace_by_write { "trace = \"write\"\n" } else { "" };
        let spaces = spaces.map_or(String::new(), |spaces| format!("vtlb_spaces = {spaces}\n"));
        format!("npt = false\nvtlb = \"{POOL}\"\nrung = \"{rung}\"\n{trace}{spaces}")
    }

    /// Returns true if this benchmark is measured.
    pub fn has(&self, benchmark: &str) -> bool {
        !self.only_jobs || benchmark == JOBS
    }

    /// Returns true if the micro-guest is run.
    pub fn has_micro_guest(&self) -> bool {
        self.paging != Paging::None && !self.only_jobs
    }

    /// Returns true if a VM of Parador is measured.
    pub fn is_parador(&self) -> bool {
        matches!(self.paging, Paging::Nested | Paging::Vtlb { .. })
    }
}

/// Returns all columns: references, rungs from the lowest to the highest, variants.
pub fn all() -> Vec<Column> {
    let column = |name, title, paging| Column { name, title, paging, only_jobs: false };
    let vtlb = |rung| Paging::Vtlb { rung, trace_by_write: false, spaces: None };
    let rung = |name, title, rung| column(name, title, vtlb(rung));
    let mut columns = vec![
        column(NATIVE, "bare machine", Paging::None),
        column("nested", "nested paging", Paging::Nested),
        column(KVM, "KVM, shadow paging", Paging::Kvm),
        rung("user", "vTLB in the VMM", "user"),
        rung("kernel", "vTLB in the kernel", "kernel"),
        rung("global", "+ global pages", "global"),
        rung("cache", "+ cache of 8 spaces", "cache=8"),
        rung("sync", "+ comparison at flushes", "sync"),
        rung("trace", "+ tracing by dirty bits", "trace"),
        rung("asid", "+ ASID per space", "asid"),
        rung(TOP, "+ INVLPGA (all)", ALL),
        column(
            "write",
            "all, tracing by write faults",
            Paging::Vtlb { rung: ALL, trace_by_write: true, spaces: None },
        ),
    ];
    columns.extend(SPACES.map(|(name, title, spaces)| {
        let paging = Paging::Vtlb { rung: ALL, trace_by_write: false, spaces: Some(spaces) };
        Column { only_jobs: true, ..column(name, title, paging) }
    }));
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_rung_has_keys() {
        let columns = all();
        let of =
            |name: &str| columns.iter().find(|column| column.name == name).unwrap().description();
        assert_eq!(of("nested"), "");
        let two = "npt = false\nvtlb = \"1M\"\nrung = \"invlpga\"\nvtlb_spaces = 2\n";
        assert_eq!(of("spaces2"), two);
        assert!(of("write").ends_with("rung = \"invlpga\"\ntrace = \"write\"\n"));
    }
}
