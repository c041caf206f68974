//! Report of the kernel functions that write to page tables, descriptor tables and devices, from
//! the wedge's counts.

use std::collections::BTreeMap;
use std::fmt::Write;

use hosted_loader::Image;

/// Prefix of the wedge's lines.
pub const MARK: &str = "profile ";

/// Counts of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// Writes to page tables: by annotated instructions, by others.
    page_tables: [u64; 2],
    descriptors: u64,
    devices: u64,
}

impl Counts {
    fn all(&self) -> u64 {
        self.page_tables.iter().sum::<u64>() + self.descriptors + self.devices
    }
}

/// Formats the report of lines without their prefix. Unparsable lines are ignored.
pub fn report(lines: &[String], image: &Image<'_>) -> String {
    let mut functions = BTreeMap::<String, Counts>::new();
    for (address, counts) in lines.iter().filter_map(|line| parse(line)) {
        let name = image.function_at(address).unwrap_or_else(|| "(module)".to_owned());
        let sum = functions.entry(name).or_default();
        for (sum, count) in sum.page_tables.iter_mut().zip(counts.page_tables) {
            *sum += count;
        }
        sum.descriptors += counts.descriptors;
        sum.devices += counts.devices;
    }
    table(&functions)
}

/// Parses `0xADDRESS ANNOTATED PAGE_TABLES DESCRIPTORS DEVICES`.
fn parse(line: &str) -> Option<(u64, Counts)> {
    let mut words = line.split(' ');
    let address = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    let mut number = || words.next()?.parse::<u64>().ok();
    let (annotated, writes, descriptors, devices) = (number()?, number()?, number()?, number()?);
    let page_tables = if annotated != 0 { [writes, 0] } else { [0, writes] };
    Some((address, Counts { page_tables, descriptors, devices }))
}

fn table(functions: &BTreeMap<String, Counts>) -> String {
    let mut sorted: Vec<_> = functions.iter().collect();
    sorted.sort_by_key(|(_, counts)| std::cmp::Reverse(counts.all()));
    let sum = |of: fn(&Counts) -> u64| functions.values().map(of).sum::<u64>();
    let [annotated, others] =
        [sum(|counts| counts.page_tables[0]), sum(|counts| counts.page_tables[1])];
    let share = 100.0 * annotated as f64 / (annotated + others).max(1) as f64;
    let mut text = format!(
        "writes to page tables: {} by annotated instructions, {} by others; coverage {share:.2} %\n\
         writes to descriptor tables: {}; accesses to devices: {}\n\n\
         {:>12} {:>12} {:>12} {:>12}  function\n",
        annotated,
        others,
        sum(|counts| counts.descriptors),
        sum(|counts| counts.devices),
        "annotated",
        "others",
        "descriptors",
        "devices",
    );
    for (name, counts) in sorted {
        let [annotated, others] = counts.page_tables;
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{annotated:>12} {others:>12} {:>12} {:>12}  {name}",
            counts.descriptors, counts.devices
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_wedge() {
        let counts = Counts { page_tables: [5, 0], descriptors: 0, devices: 0 };
        assert_eq!(parse("0x41000000 1 5 0 0"), Some((0x4100_0000, counts)));
        let counts = Counts { page_tables: [0, 5], descriptors: 2, devices: 1 };
        assert_eq!(parse("0x41000000 0 5 2 1"), Some((0x4100_0000, counts)));
        assert_eq!(parse("0x41000000 0 5 2"), None);
        assert_eq!(parse("something else"), None);
    }

    #[test]
    fn coverage() {
        let of = |page_tables| Counts { page_tables, ..Counts::default() };
        let functions = [("set_pte", of([3, 0])), ("memcpy", of([0, 1]))];
        let functions = functions.map(|(name, counts)| (name.to_owned(), counts)).into();
        let text = table(&functions);
        assert!(text.starts_with(
            "writes to page tables: 3 by annotated instructions, 1 by others; coverage 75.00 %"
        ));
        assert!(text.find("set_pte") < text.find("memcpy"));
    }
}
