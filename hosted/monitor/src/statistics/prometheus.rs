//! Statistics of VMs as metrics for Prometheus. Names of devices' metrics follow those of its
//! exporter of hosts (`node_exporter`).

use super::devices::{DiskStatistics, FrameStatistics, NetStatistics, Requests, ShareStatistics};
use super::latency::LatencyHistogram;
use super::{GuestMemory, Statistics};
use crate::state::State;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Metric with the values of one or more VMs.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Vec<Sample>,
}

/// Value of a metric.
struct Sample {
    /// End of the name: those of histograms have several.
    suffix: &'static str,
    labels: Vec<Label>,
    value: String,
}

/// Label of a value: name and value.
type Label = (&'static str, String);
/// Returns a figure of requests as text.
type RequestValue = fn(&Requests) -> String;

/// Formats the statistics of VMs for Prometheus (text format 0.0.4), with their names as label
/// `vm`.
pub fn prometheus(vms: &[(Option<&str>, Statistics)]) -> String {
    let mut families: Vec<Family> = Vec::new();
    for (vm, statistics) in vms {
        for mut family in statistics.families() {
            let named = vm.map(|name| ("vm", name.to_owned()));
            for sample in &mut family.samples {
                sample.labels.extend(named.clone());
            }
            // All values of a metric are together.
            match families.iter_mut().find(|known| known.name == family.name) {
                Some(known) => known.samples.extend(family.samples),
                None => families.push(family),
            }
        }
    }
    let mut text = String::new();
    for Family { name, kind, help, samples } in families {
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP parador_{name} {help}\n# TYPE parador_{name} {kind}");
        for Sample { suffix, labels, value } in samples {
            let labels = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escape(value)));
            let labels = labels.collect::<Vec<_>>().join(",");
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            let _ = writeln!(text, "parador_{name}{suffix}{labels} {value}");
        }
    }
    text
}

/// Metrics of one VM.
#[derive(Default)]
struct Metrics(Vec<Family>);

impl Metrics {
    /// Adds a metric with these labels and values.
    fn add(
        &mut self,
        name: &'static str,
        kind: &'static str,
        help: &'static str,
        values: impl IntoIterator<Item = (Vec<Label>, String)>,
    ) {
        let values = values.into_iter();
        let samples = values.map(|(labels, value)| Sample { suffix: "", labels, value }).collect();
        self.0.push(Family { name, kind, help, samples });
    }

    /// Adds histograms of times in seconds: with these labels, the histogram, and the sum of times
    /// in nanoseconds.
    fn add_histograms<'a>(
        &mut self,
        name: &'static str,
        help: &'static str,
        all: impl IntoIterator<Item = (Vec<Label>, &'a LatencyHistogram, u64)>,
    ) {
        let samples = all.into_iter().flat_map(|(labels, histogram, time_ns)| {
            let sample = |suffix, more: Option<Label>, value| {
                let labels = labels.iter().cloned().chain(more).collect();
                Sample { suffix, labels, value }
            };
            let buckets = histogram.cumulative().map(|(bound, count)| {
                // The shortest text that is the same number, without an exponent.
                let bound = bound.map(|bound| (bound as f64 / 1e9).to_string());
                let bound = bound.unwrap_or_else(|| "+Inf".to_owned());
                sample("_bucket", Some(("le", bound)), count.to_string())
            });
            let sum = sample("_sum", None, precise_seconds(time_ns));
            let count = sample("_count", None, histogram.count().to_string());
            buckets.chain([sum, count]).collect::<Vec<_>>()
        });
        self.0.push(Family { name, kind: HISTOGRAM, help, samples: samples.collect() });
    }

    /// Adds four metrics of requests, by device and operation: their number, failures, longest
    /// time, times. `texts`: names and help of these; `rows`: the requests by device.
    fn add_requests<const N: usize>(
        &mut self,
        label: &'static str,
        texts: [(&'static str, &'static str); 4],
        rows: &[(&String, [(&'static str, &Requests); N])],
    ) {
        let kinds: [(&'static str, RequestValue); 3] = [
            (COUNTER, |of| of.requests.to_string()),
            (COUNTER, |of| of.failed.to_string()),
            (GAUGE, |of| precise_seconds(of.max_ns)),
        ];
        let all = || {
            rows.iter().flat_map(|(device, ops)| {
                let labels = |op: &str| vec![(label, (*device).clone()), ("op", op.to_owned())];
                ops.map(|(op, of)| (labels(op), of))
            })
        };
        let [.., times] = texts;
        for ((name, help), (kind, value)) in texts.into_iter().zip(kinds) {
            self.add(name, kind, help, all().map(|(labels, of)| (labels, value(of))));
        }
        let times_of = all().map(|(labels, of)| (labels, &of.histogram, of.time_ns));
        self.add_histograms(times.0, times.1, times_of);
    }

    /// Adds a metric with one value.
    fn one(&mut self, name: &'static str, kind: &'static str, help: &'static str, value: String) {
        self.add(name, kind, help, [(Vec::new(), value)]);
    }

    /// Adds a metric with one value, if there is one.
    fn some(
        &mut self,
        name: &'static str,
        kind: &'static str,
        help: &'static str,
        value: Option<u64>,
    ) {
        if let Some(value) = value {
            self.one(name, kind, help, value.to_string());
        }
    }
}

fn seconds(milliseconds: u64) -> String {
    format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000)
}

fn precise_seconds(nanoseconds: u64) -> String {
    format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000)
}

const COUNTER: &str = "counter";
const GAUGE: &str = "gauge";
const HISTOGRAM: &str = "histogram";

impl Statistics {
    /// Returns the metrics of this VM.
    fn families(&self) -> Vec<Family> {
        let mut metrics = Metrics::default();
        self.add_vm(&mut metrics);
        self.add_cpu(&mut metrics);
        self.add_memory(&mut metrics);
        self.add_disks(&mut metrics);
        self.add_nets(&mut metrics);
        self.add_shares(&mut metrics);
        let labelled = |label: &'static str, values: &BTreeMap<String, u64>| -> Vec<_> {
            let values = values.iter();
            values.map(|(name, count)| (vec![(label, name.clone())], count.to_string())).collect()
        };
        let counters = labelled("what", &self.wedge.counters);
        metrics.add("wedge_total", COUNTER, "Events handled by the wedge.", counters);
        let sites = labelled("kind", &self.wedge.sites);
        metrics.add("sites_total", COUNTER, "Entries into the wedge by kind of site.", sites);
        metrics.0
    }

    fn add_vm(&self, metrics: &mut Metrics) {
        let states = [State::Created, State::Starting, State::Running, State::Paused, State::Ended];
        let states = states.map(|state| {
            let name = state.to_string();
            (vec![("state", name)], u8::from(state == self.state).to_string())
        });
        metrics.add("state", GAUGE, "1 for the VM's current state.", states);
        let help = "Time since the last start.";
        metrics.one("uptime_seconds", GAUGE, help, seconds(self.uptime_ms));
        if let Some(start) = self.start_ms {
            let help = "Time from the start to the guest's first instruction.";
            metrics.one("start_seconds", GAUGE, help, seconds(start));
        }
        metrics.one("resets_total", COUNTER, "Restarts of the VM.", self.resets.to_string());
        let help = "Host processes of the VM.";
        metrics.one("processes", GAUGE, help, self.processes.to_string());
        metrics.one("vcpus", GAUGE, "Virtual CPUs.", self.vcpus.to_string());
    }

    fn add_cpu(&self, metrics: &mut Metrics) {
        let modes = [("user", self.user_ms), ("system", self.system_ms)]
            .map(|(mode, time)| (vec![("mode", mode.to_owned())], seconds(time)));
        let help = "CPU time of the VM's processes.";
        metrics.add("cpu_seconds_total", COUNTER, help, modes);
        let help = "Time that runnable threads of the VM's present processes waited for a CPU.";
        metrics.one("cpu_steal_seconds", GAUGE, help, seconds(self.steal_ms));
        let times = self.vcpu_times.iter().enumerate().flat_map(|(index, times)| {
            [("run", times.run_ms), ("steal", times.steal_ms), ("idle", times.idle_ms)].map(
                |(state, time)| {
                    let labels = vec![("vcpu", index.to_string()), ("state", state.to_owned())];
                    (labels, seconds(time))
                },
            )
        });
        let help = "Time of the vCPU: executing, waiting for a host CPU, idle or paused.";
        metrics.add("vcpu_seconds_total", COUNTER, help, times);
    }

    fn add_memory(&self, metrics: &mut Metrics) {
        metrics.one("memory_bytes", GAUGE, "Guest memory.", self.memory_bytes.to_string());
        let help = "Guest memory allocated by the host.";
        metrics.one("memory_used_bytes", GAUGE, help, self.memory_used_bytes.to_string());
        let help = "Target size of the balloon.";
        metrics.some("balloon_bytes", GAUGE, help, self.balloon_bytes);
        let Some(memory) = &self.guest_memory else { return };
        let GuestMemory { age_ms, total_bytes, free_bytes, available_bytes, cache_bytes, .. } =
            *memory;
        let help = "Time since the guest's report of its memory.";
        metrics.one("guest_memory_age_seconds", GAUGE, help, seconds(age_ms));
        let help = "Memory that the guest kernel manages, as the guest reports.";
        metrics.some("guest_memory_total_bytes", GAUGE, help, total_bytes);
        let help = "Unused memory, as the guest reports.";
        metrics.some("guest_memory_free_bytes", GAUGE, help, free_bytes);
        let help = "Memory available to applications without swapping, as the guest reports.";
        metrics.some("guest_memory_available_bytes", GAUGE, help, available_bytes);
        let help = "Memory of caches, as the guest reports.";
        metrics.some("guest_memory_cache_bytes", GAUGE, help, cache_bytes);
        let help = "Bytes swapped in, as the guest reports.";
        metrics.some("guest_swapped_in_bytes_total", COUNTER, help, memory.swapped_in_bytes);
        let help = "Bytes swapped out, as the guest reports.";
        metrics.some("guest_swapped_out_bytes_total", COUNTER, help, memory.swapped_out_bytes);
        let help = "Major page faults, as the guest reports.";
        metrics.some("guest_major_faults_total", COUNTER, help, memory.major_faults);
        let help = "Minor page faults, as the guest reports.";
        metrics.some("guest_minor_faults_total", COUNTER, help, memory.minor_faults);
    }

    fn add_disks(&self, metrics: &mut Metrics) {
        let bytes = |of: fn(&DiskStatistics) -> &Requests| {
            let disks = self.disks.iter();
            disks.map(move |disk| (vec![("disk", disk.name.clone())], of(disk).bytes.to_string()))
        };
        let help = "Bytes read from the disk.";
        metrics.add("disk_read_bytes_total", COUNTER, help, bytes(|disk| &disk.read));
        let help = "Bytes written to the disk.";
        metrics.add("disk_written_bytes_total", COUNTER, help, bytes(|disk| &disk.write));
        let help = "Bytes of the disk discarded or zeroed.";
        metrics.add("disk_discarded_bytes_total", COUNTER, help, bytes(|disk| &disk.discard));
        let rows: Vec<_> = (self.disks.iter())
            .map(|DiskStatistics { name, read, write, flush, discard }| {
                let ops =
                    [("read", read), ("write", write), ("flush", flush), ("discard", discard)];
                (name, ops)
            })
            .collect();
        let texts = [
            ("disk_requests_total", "Ended requests of the disk."),
            ("disk_failed_requests_total", "Failed ones of them."),
            ("disk_request_max_seconds", "Longest time of one."),
            ("disk_request_seconds", "Times of the requests."),
        ];
        metrics.add_requests("disk", texts, &rows);
    }

    fn add_nets(&self, metrics: &mut Metrics) {
        let frames = |value: fn(&NetStatistics) -> String| {
            self.nets.iter().map(move |net| (vec![("net", net.name.clone())], value(net)))
        };
        let values = frames(|net| net.receive.bytes.to_string());
        metrics.add(
            "network_receive_bytes_total",
            COUNTER,
            "Bytes of frames to the guest.",
            values,
        );
        let values = frames(|net| net.receive.frames.to_string());
        metrics.add("network_receive_packets_total", COUNTER, "Frames to the guest.", values);
        let help = "Bytes of frames from the guest.";
        let values = frames(|net| net.transmit.bytes.to_string());
        metrics.add("network_transmit_bytes_total", COUNTER, help, values);
        let values = frames(|net| net.transmit.frames.to_string());
        metrics.add("network_transmit_packets_total", COUNTER, "Frames from the guest.", values);
        let values = frames(|net| net.transmit.dropped.to_string());
        metrics.add("network_transmit_drop_total", COUNTER, "Frames refused by the host.", values);
        let help = "Time for which frames from the guest waited for the host to take them.";
        let waits = self.nets.iter().map(|net| {
            let FrameStatistics { histogram, time_ns, .. } = &net.transmit;
            (vec![("net", net.name.clone())], histogram, *time_ns)
        });
        metrics.add_histograms("network_transmit_seconds", help, waits);
        let values = frames(|net| precise_seconds(net.transmit.max_ns));
        metrics.add("network_transmit_max_seconds", GAUGE, "Longest of these waits.", values);
    }

    fn add_shares(&self, metrics: &mut Metrics) {
        let bytes = |of: fn(&ShareStatistics) -> &Requests| {
            let shares = self.shares.iter();
            shares
                .map(move |share| (vec![("share", share.tag.clone())], of(share).bytes.to_string()))
        };
        let help = "Bytes read from the shared directory.";
        metrics.add("share_read_bytes_total", COUNTER, help, bytes(|share| &share.read));
        let help = "Bytes written to the shared directory.";
        metrics.add("share_written_bytes_total", COUNTER, help, bytes(|share| &share.write));
        let rows: Vec<_> = (self.shares.iter())
            .map(|ShareStatistics { tag, read, write, other }| {
                (tag, [("read", read), ("write", write), ("other", other)])
            })
            .collect();
        let texts = [
            ("share_requests_total", "Ended 9P messages."),
            ("share_failed_requests_total", "Failed ones of them."),
            ("share_request_max_seconds", "Longest time of one."),
            ("share_request_seconds", "Times of the messages."),
        ];
        metrics.add_requests("share", texts, &rows);
    }
}

/// Escapes a label's value.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Wedge;
    use crate::statistics::testing::statistics;

    #[test]
    fn metrics_for_prometheus() {
        let wedge = Wedge {
            counters: [("calls_by_signal".to_owned(), 7)].into(),
            sites: [("cli".to_owned(), u64::MAX)].into(),
        };
        let statistics = Statistics {
            state: State::Paused,
            uptime_ms: 61_007,
            start_ms: Some(80),
            user_ms: 1500,
            system_ms: 20,
            steal_ms: 1002,
            wedge,
            ..statistics()
        };
        let text = prometheus(&[(Some("a"), statistics.clone()), (Some("b"), statistics.clone())]);
        for line in [
            "parador_state{state=\"paused\",vm=\"b\"} 1",
            "parador_memory_bytes{vm=\"a\"} 1073741824",
            "parador_disk_read_bytes_total{disk=\"disk0\",vm=\"a\"} 4096",
            "parador_disk_written_bytes_total{disk=\"a\\\"\\\\\",vm=\"a\"} 512",
            "parador_disk_requests_total{disk=\"disk0\",op=\"read\",vm=\"b\"} 2",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}:\n{text}");
        }
        assert!(!text.contains("guest_memory_available"), "the guest does not report it");
        assert_eq!(text.matches("# TYPE parador_state ").count(), 1, "{text}");
        let bucket = "parador_disk_request_seconds_bucket{disk=\"disk0\",op=\"read\",le=\"+Inf\",vm=\"b\"} 2";
        assert!(text.contains(bucket), "{text}");
        let text = prometheus(&[(None, statistics)]);
        for line in [
            "parador_cpu_steal_seconds 1.002",
            "parador_state{state=\"paused\"} 1",
            "parador_state{state=\"running\"} 0",
            "parador_uptime_seconds 61.007",
            "parador_start_seconds 0.080",
            "parador_cpu_seconds_total{mode=\"system\"} 0.020",
            "parador_wedge_total{what=\"calls_by_signal\"} 7",
            "parador_sites_total{kind=\"cli\"} 18446744073709551615",
            "# TYPE parador_resets_total counter",
            "# TYPE parador_disk_request_seconds histogram",
            "parador_disk_request_seconds_bucket{disk=\"disk0\",op=\"read\",le=\"0.000004\"} 1",
            "parador_disk_request_seconds_bucket{disk=\"disk0\",op=\"read\",le=\"0.000008\"} 1",
            "parador_disk_request_seconds_bucket{disk=\"disk0\",op=\"read\",le=\"0.000016\"} 2",
            "parador_disk_request_seconds_bucket{disk=\"disk0\",op=\"read\",le=\"8.388608\"} 2",
            "parador_disk_request_seconds_bucket{disk=\"disk0\",op=\"read\",le=\"+Inf\"} 2",
            "parador_disk_request_seconds_sum{disk=\"disk0\",op=\"read\"} 1.500000000",
            "parador_disk_request_seconds_count{disk=\"disk0\",op=\"read\"} 2",
            "parador_share_request_seconds_count{share=\"tag\",op=\"other\"} 0",
            "parador_network_transmit_seconds_bucket{net=\"net0\",le=\"+Inf\"} 0",
            "parador_disk_request_max_seconds{disk=\"disk0\",op=\"read\"} 0.000000700",
            "parador_disk_failed_requests_total{disk=\"disk0\",op=\"flush\"} 1",
            "parador_network_receive_bytes_total{net=\"net0\"} 1514",
            "parador_network_transmit_packets_total{net=\"net0\"} 3",
            "parador_share_requests_total{share=\"tag\",op=\"other\"} 9",
            "parador_vcpu_seconds_total{vcpu=\"1\",state=\"steal\"} 0.070",
            "parador_guest_memory_free_bytes 2048",
            "parador_balloon_bytes 4096",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}:\n{text}");
        }
    }
}
