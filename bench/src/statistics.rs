//! VmStatistics that root logs when a VM ends.

use anyhow::{Context, Result};

/// VmStatistics of one VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmStatistics {
    /// World switches into the guest.
    pub entries: f64,
    /// Exits that the kernel handled itself.
    pub settled: f64,
    /// Memory taken for the VM beyond guest memory, in bytes.
    pub bytes: f64,
    /// Size of the VMM's image in bytes, mapped from the boot module and shared by all VMs.
    pub shared: f64,
    /// Exits by reason.
    pub exits: Vec<(String, u64)>,
}

impl VmStatistics {
    /// Reads the last `statistics: name=value ...` line of a log.
    pub fn read(log: &str) -> Result<Self> {
        Self::all(log).last().context("the log has no statistics of the virtual machine")
    }

    /// Reads the statistics of all VMs that have ended.
    pub fn all(log: &str) -> impl Iterator<Item = Self> {
        let mark = "statistics: ";
        log.lines()
            .filter_map(move |line| Some(Self::parse(&line[line.find(mark)? + mark.len()..])))
    }

    fn parse(line: &str) -> Self {
        let mut statistics = Self::default();
        for word in line.split_whitespace() {
            let Some((name, value)) = word.split_once('=') else { continue };
            let Ok(count) = value.parse::<u64>() else { continue };
            match name {
                "entries" => statistics.entries = count as f64,
                "settled" => statistics.settled = count as f64,
                "bytes" => statistics.bytes = count as f64,
                "shared" => statistics.shared = count as f64,
                "server_events" | "server_events_elsewhere" => {}
                _ => statistics.exits.push((name.to_owned(), count)),
            }
        }
        statistics
    }

    /// Returns the difference to `before`, a shorter run of the same system.
    pub fn since(&self, before: &Self) -> Self {
        let earlier = |name: &String| {
            before.exits.iter().find(|(other, _)| other == name).map_or(0, |(_, count)| *count)
        };
        Self {
            entries: self.entries - before.entries,
            settled: self.settled - before.settled,
            bytes: self.bytes,
            shared: self.shared,
            exits: self
                .exits
                .iter()
                .map(|(name, count)| (name.clone(), count.saturating_sub(earlier(name))))
                .collect(),
        }
    }

    /// Prints the exits by reason, most frequent first.
    pub fn print(&self, phase: &str) {
        println!(
            "\nworld switches during {phase}: {:.0}, of these settled by the kernel: {:.0}",
            self.entries, self.settled
        );
        let mut exits = self.exits.clone();
        exits.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        for (reason, count) in exits.iter().filter(|(_, count)| *count > 0) {
            println!("  {count:>10}  {reason}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_last_line() {
        let log = "root: vm: statistics: entries=1\nroot: vm: statistics: entries=7 settled=2 bytes=4096 server_events=5 cpuid=3 port=2\nend\n";
        let statistics = VmStatistics::read(log).unwrap();
        assert_eq!((statistics.entries, statistics.settled, statistics.bytes), (7.0, 2.0, 4096.0));
        assert_eq!(statistics.exits, [("cpuid".to_owned(), 3), ("port".to_owned(), 2)]);
        assert_eq!(VmStatistics::all(log).map(|one| one.entries).sum::<f64>(), 8.0);
        assert!(VmStatistics::read("nothing").is_err());
        let before = VmStatistics::read("statistics: entries=3 cpuid=1").unwrap();
        let after = statistics.since(&before);
        assert_eq!((after.entries, after.exits[0].1, after.exits[1].1), (4.0, 2, 2));
    }
}
