//! vTLB of a VM in a system description: `npt = false`, `vtlb`, `rung`, `vtlb_spaces`, `trace`.

use crate::description::{self, Trace};
use hosted_command::problem::Problem;
use hosted_command::value::Size;
use proto::vtlb::{DEFAULT_SPACES, MAX_POOL, MAX_SPACES, MIN_POOL, Rung, Vtlb};
use toml::Spanned;

/// Bytes of a page.
const PAGE: u64 = 4 << 10;
/// Rungs by name, from the lowest; `cache` is followed by `=N`.
const RUNGS: [(&str, Rung); 8] = [
    ("user", Rung::User),
    ("kernel", Rung::Kernel),
    ("global", Rung::Global),
    (CACHE, Rung::Cache),
    ("sync", Rung::Sync),
    ("trace", Rung::Trace),
    ("asid", Rung::Asid),
    ("invlpga", Rung::InvalidatePage),
];
const CACHE: &str = "cache";

/// Checks the vTLB of a VM; `None`: nested paging.
pub(crate) fn check(vm: &description::Vm, problems: &mut Vec<Problem>) -> Option<Vtlb> {
    if vm.npt {
        let vtlb = vm.vtlb.as_ref().map(|value| ("vtlb", value.span()));
        let rung = vm.rung.as_ref().map(|value| ("rung", value.span()));
        let spaces = vm.vtlb_spaces.as_ref().map(|value| ("vtlb_spaces", value.span()));
        let trace = vm.trace.as_ref().map(|value| ("trace", value.span()));
        for (key, span) in [vtlb, rung, spaces, trace].into_iter().flatten() {
            let message = format!("`{key}` belongs to a virtual machine without nested paging");
            problems.push(Problem::new(span, message).help("add `npt = false`, or remove the key"));
        }
        return None;
    }
    let (rung, of_rung) = match &vm.rung {
        None => (Rung::InvalidatePage, None),
        Some(text) => parse_rung(text.get_ref()).unwrap_or_else(|message| {
            problems.push(Problem::new(text.span(), message));
            (Rung::InvalidatePage, None)
        }),
    };
    if let Some(trace) = vm.trace.as_ref().filter(|_| rung < Rung::Trace) {
        let message = "`trace` needs the rung `trace` or one above it";
        problems.push(Problem::new(trace.span(), message));
    }
    Some(Vtlb {
        pool: pool(vm.vtlb.as_ref(), problems),
        rung,
        spaces: spaces(vm.vtlb_spaces.as_ref(), rung, of_rung, problems),
        trace_writes: vm.trace.as_ref().is_some_and(|trace| *trace.get_ref() == Trace::Write),
    })
}

/// Returns the pool of a vCPU in pages.
fn pool(given: Option<&Spanned<Size>>, problems: &mut Vec<Problem>) -> u32 {
    let Some(given) = given else { return MAX_POOL };
    let Size(bytes) = *given.get_ref();
    let pages = u32::try_from(bytes / PAGE).unwrap_or(u32::MAX);
    if bytes % PAGE == 0 && (MIN_POOL..=MAX_POOL).contains(&pages) {
        return pages;
    }
    let size = |pages: u32| Size(u64::from(pages) * PAGE);
    let message = format!(
        "`vtlb` must be {} to {}, a multiple of {} (got {})",
        size(MIN_POOL),
        size(MAX_POOL),
        Size(PAGE),
        given.get_ref()
    );
    problems.push(Problem::new(given.span(), message));
    MAX_POOL
}

/// Returns the number of address spaces: that of `vtlb_spaces`, or of the rung `cache=N`.
fn spaces(
    given: Option<&Spanned<u32>>,
    rung: Rung,
    of_rung: Option<u8>,
    problems: &mut Vec<Problem>,
) -> u8 {
    let Some(given) = given else { return of_rung.unwrap_or(DEFAULT_SPACES) };
    let mut refuse = |message| problems.push(Problem::new(given.span(), message));
    if rung < Rung::Cache {
        refuse("`vtlb_spaces` needs the rung `cache` or one above it".to_owned());
    } else if let Some(number) = of_rung {
        refuse(format!("`vtlb_spaces` and the rung `cache={number}` exclude each other"));
    }
    match u8::try_from(*given.get_ref()) {
        Ok(number @ 1..=MAX_SPACES) => number,
        _ => {
            refuse(format!("`vtlb_spaces` must be 1 to {MAX_SPACES} (got {})", given.get_ref()));
            DEFAULT_SPACES
        }
    }
}

/// Returns the rung with this name, and the number of address spaces if it has one.
fn parse_rung(text: &str) -> Result<(Rung, Option<u8>), String> {
    if let Some(number) = text.strip_prefix(CACHE).and_then(|rest| rest.strip_prefix('=')) {
        return match number.parse() {
            Ok(spaces @ 1..=MAX_SPACES) => Ok((Rung::Cache, Some(spaces))),
            _ => Err(format!("`cache=` needs a number from 1 to {MAX_SPACES} (got `{number}`)")),
        };
    }
    let known = RUNGS.iter().find(|(name, _)| *name == text);
    known.map(|&(_, rung)| (rung, None)).ok_or_else(|| {
        let names = RUNGS.map(|(name, _)| if name == CACHE { "cache=N" } else { name });
        format!("no rung `{text}`; expected one of {}", names.join(", "))
    })
}

/// Describes a vTLB for the summary.
pub(crate) fn describe(vtlb: Vtlb) -> String {
    let name = RUNGS.iter().find(|(_, rung)| *rung == vtlb.rung).map_or("", |(name, _)| name);
    let spaces = match vtlb.rung {
        Rung::Cache => format!("={}", vtlb.spaces),
        rung if rung > Rung::Cache && vtlb.spaces != DEFAULT_SPACES => {
            format!(", {} spaces", vtlb.spaces)
        }
        _ => String::new(),
    };
    let pool = Size(u64::from(vtlb.pool) * PAGE);
    format!("vTLB of {pool} per vCPU up to {name}{spaces}")
}

/// Returns the memory of the pools of a VM, in bytes.
pub(crate) fn memory(vtlb: Option<Vtlb>, vcpus: u32) -> u64 {
    vtlb.map_or(0, |vtlb| u64::from(vtlb.pool) * PAGE * u64::from(vcpus))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::toml_text::parse;
    use std::ops::Range;

    const BASE: &str =
        "[system]\nboard = \"pc\"\n[[vm]]\nname = \"a\"\nkernel = \"k\"\nmemory = \"1M\"\n";

    /// Checks a VM with these keys: its vTLB, and the place and message of each problem.
    fn checked(keys: &str) -> (Option<Vtlb>, Vec<(String, String)>) {
        let text = format!("{BASE}{keys}");
        let description: description::Description =
            parse(&text).unwrap_or_else(|problem| panic!("{keys}: {}", problem.message));
        let mut problems = Vec::new();
        let vtlb = check(description.vm[0].get_ref(), &mut problems);
        let place = |span: Option<Range<usize>>| text[span.unwrap()].to_owned();
        (vtlb, problems.into_iter().map(|it| (place(it.span), it.message)).collect())
    }

    #[test]
    fn keys_and_defaults() {
        let top = Vtlb { pool: 256, rung: Rung::InvalidatePage, spaces: 8, trace_writes: false };
        for (keys, expected) in [
            ("", None),
            ("npt = true", None),
            ("npt = false", Some(top)),
            ("npt = false\nvtlb = \"256K\"", Some(Vtlb { pool: 64, ..top })),
            ("npt = false\nrung = \"user\"", Some(Vtlb { rung: Rung::User, ..top })),
            (
                "npt = false\nvtlb = \"1M\"\nrung = \"kernel\"",
                Some(Vtlb { rung: Rung::Kernel, ..top }),
            ),
            (
                "npt = false\nrung = \"cache=32\"",
                Some(Vtlb { rung: Rung::Cache, spaces: 32, ..top }),
            ),
            ("npt = false\nrung = \"cache\"", Some(Vtlb { rung: Rung::Cache, ..top })),
            ("npt = false\nrung = \"global\"", Some(Vtlb { rung: Rung::Global, ..top })),
            ("npt = false\nrung = \"sync\"", Some(Vtlb { rung: Rung::Sync, ..top })),
            (
                "npt = false\nrung = \"trace\"\ntrace = \"write\"",
                Some(Vtlb { rung: Rung::Trace, trace_writes: true, ..top }),
            ),
            ("npt = false\nrung = \"asid\"", Some(Vtlb { rung: Rung::Asid, ..top })),
            ("npt = false\nrung = \"invlpga\"\ntrace = \"dirty\"", Some(top)),
            ("npt = false\nvtlb_spaces = 32", Some(Vtlb { spaces: 32, ..top })),
            (
                "npt = false\nrung = \"cache\"\nvtlb_spaces = 1",
                Some(Vtlb { rung: Rung::Cache, spaces: 1, ..top }),
            ),
            (
                "npt = false\nrung = \"sync\"\nvtlb_spaces = 2",
                Some(Vtlb { rung: Rung::Sync, spaces: 2, ..top }),
            ),
        ] {
            assert_eq!(checked(keys), (expected, Vec::new()), "{keys}");
        }
    }

    #[test]
    fn wrong_values_are_refused_at_their_place() {
        for (keys, place, message) in [
            ("vtlb = \"1M\"", "\"1M\"", "without nested paging"),
            ("npt = true\nrung = \"sync\"", "\"sync\"", "`rung` belongs to"),
            ("trace = \"write\"", "\"write\"", "`trace` belongs to"),
            ("npt = false\nvtlb = \"60K\"", "\"60K\"", "256 KiB to 1 MiB"),
            ("npt = false\nvtlb = \"65K\"", "\"65K\"", "a multiple of 4 KiB"),
            ("npt = false\nvtlb = \"2M\"", "\"2M\"", "(got 2 MiB)"),
            ("npt = false\nrung = \"cache=0\"", "\"cache=0\"", "1 to 32"),
            ("npt = false\nrung = \"cache=33\"", "\"cache=33\"", "1 to 32"),
            ("npt = false\nrung = \"cache=\"", "\"cache=\"", "1 to 32"),
            ("npt = false\nrung = \"users\"", "\"users\"", "user, kernel, global, cache=N, sync"),
            ("npt = false\nrung = \"sync\"\ntrace = \"write\"", "\"write\"", "needs the rung"),
            ("vtlb_spaces = 4", "4", "`vtlb_spaces` belongs to"),
            ("npt = false\nvtlb_spaces = 0", "0", "must be 1 to 32 (got 0)"),
            ("npt = false\nvtlb_spaces = 33", "33", "must be 1 to 32 (got 33)"),
            ("npt = false\nrung = \"global\"\nvtlb_spaces = 4", "4", "needs the rung `cache`"),
            ("npt = false\nrung = \"cache=4\"\nvtlb_spaces = 4", "4", "exclude each other"),
        ] {
            let (_, problems) = checked(keys);
            let [(found, text)] = &problems[..] else { panic!("{keys}: {problems:?}") };
            assert_eq!(found, place, "{keys}");
            assert!(text.contains(message), "{keys}: {text}");
        }
    }

    #[test]
    fn descriptions() {
        let of = |keys| describe(checked(keys).0.unwrap());
        assert_eq!(of("npt = false"), "vTLB of 1 MiB per vCPU up to invlpga");
        let cache = of("npt = false\nvtlb = \"256K\"\nrung = \"cache=4\"");
        assert_eq!(cache, "vTLB of 256 KiB per vCPU up to cache=4");
        let many = of("npt = false\nvtlb_spaces = 16");
        assert_eq!(many, "vTLB of 1 MiB per vCPU up to invlpga, 16 spaces");
        assert_eq!(memory(checked("npt = false").0, 3), 3 << 20);
        assert_eq!(memory(None, 3), 0);
    }
}
