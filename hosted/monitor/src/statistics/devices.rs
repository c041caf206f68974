//! Counters of a VM's devices, from the memory of its workers, which no guest can change.

use super::latency::LatencyHistogram;
use crate::config::Config;
use hosted_command::failure::{Failure, IoContext};
use proto::hosted::counters::{OpTotals, VmCounters, op};
use proto::hosted::{MAX_DISKS, MAX_NETS, MAX_QUEUES, layout};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::OwnedFd;

/// Name of the memory file of the counters.
const NAME: &str = "parador-counters";

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(!default)]
pub struct Requests {
    /// Ended requests, failed ones included.
    pub requests: u64,
    /// Failed requests.
    pub failed: u64,
    /// Bytes of the data of successful requests.
    pub bytes: u64,
    /// Sum of the requests' times on the host, in nanoseconds: from their start by a worker to
    /// their end.
    pub time_ns: u64,
    /// Longest of these times in nanoseconds.
    pub max_ns: u64,
    /// Number of these times by length.
    pub histogram: LatencyHistogram,
}

impl From<OpTotals> for Requests {
    fn from(totals: OpTotals) -> Self {
        let OpTotals { requests, failed, bytes, nanoseconds, longest, buckets } = totals;
        let (time_ns, max_ns, histogram) = (nanoseconds, longest, LatencyHistogram(buckets));
        Self { requests, failed, bytes, time_ns, max_ns, histogram }
    }
}

/// Requests of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(!default)]
pub struct DiskStatistics {
    /// Name: `id` of the disk, else `disk` and its index.
    pub name: String,
    /// Reads.
    pub read: Requests,
    /// Writes.
    pub write: Requests,
    /// Flushes.
    pub flush: Requests,
    /// Discards and writes of zeros.
    pub discard: Requests,
}

/// Frames in one direction. A frame with segmentation offload counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(!default)]
pub struct FrameStatistics {
    /// Frames, dropped ones included.
    pub frames: u64,
    /// Frames that the host has refused.
    pub dropped: u64,
    /// Bytes of the frames, Ethernet headers included.
    pub bytes: u64,
    /// Time in nanoseconds for which frames waited for the host to take them; 0 for received ones.
    pub time_ns: u64,
    /// Longest of these waits in nanoseconds.
    pub max_ns: u64,
    /// Number of these waits by length. Several frames can have one.
    pub histogram: LatencyHistogram,
}

impl From<OpTotals> for FrameStatistics {
    fn from(totals: OpTotals) -> Self {
        let OpTotals { requests, failed, bytes, nanoseconds, longest, buckets } = totals;
        let (time_ns, max_ns, histogram) = (nanoseconds, longest, LatencyHistogram(buckets));
        Self { frames: requests, dropped: failed, bytes, time_ns, max_ns, histogram }
    }
}

/// Frames of a network card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(!default)]
pub struct NetStatistics {
    /// Name: `net` and its index.
    pub name: String,
    /// Frames to the guest.
    pub receive: FrameStatistics,
    /// Frames from the guest.
    pub transmit: FrameStatistics,
}

/// Messages of a shared directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(!default)]
pub struct ShareStatistics {
    /// Mount tag.
    pub tag: String,
    /// Reads.
    pub read: Requests,
    /// Writes.
    pub write: Requests,
    /// All other messages.
    pub other: Requests,
}

/// Counters of all devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatistics {
    /// Disks.
    pub disks: Vec<DiskStatistics>,
    /// Networks.
    pub nets: Vec<NetStatistics>,
    /// Shared directories.
    pub shares: Vec<ShareStatistics>,
}

/// Creates the memory of the counters. No process can change its size.
pub fn create() -> Result<OwnedFd, Failure> {
    let created = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let created = created.and_then(|file| {
        ftruncate(&file, layout::COUNTERS_LENGTH)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    });
    created.os_error("create a memory file for counters")
}

impl DeviceStatistics {
    /// Reads the counters of the devices in this configuration; without a file, all are 0.
    pub fn read(config: &Config, file: Option<&File>) -> Self {
        let totals = |device: usize, op: usize| {
            let words = file.map(|file| super::words(file, VmCounters::offset(device, op)));
            words.map(|words| OpTotals::from_words(&words)).unwrap_or_default()
        };
        let disks = config.disk.iter().enumerate().take(MAX_DISKS);
        let disks = disks.map(|(index, disk)| DiskStatistics {
            name: disk.name(index),
            read: totals(index, op::READ).into(),
            write: totals(index, op::WRITE).into(),
            flush: totals(index, op::FLUSH).into(),
            discard: totals(index, op::DISCARD).into(),
        });
        let nets = config.net.iter().filter(|net| net.is_connected()).take(MAX_NETS);
        let nets = (MAX_QUEUES..).zip(nets).map(|(device, _)| NetStatistics {
            name: format!("net{}", device - MAX_QUEUES),
            receive: totals(device, op::RECEIVE).into(),
            transmit: totals(device, op::TRANSMIT).into(),
        });
        let shares = (MAX_DISKS..MAX_QUEUES).zip(&config.share);
        let shares = shares.map(|(device, share)| ShareStatistics {
            tag: share.tag.0.clone(),
            read: totals(device, op::READ).into(),
            write: totals(device, op::WRITE).into(),
            other: totals(device, op::OTHER).into(),
        });
        Self { disks: disks.collect(), nets: nets.collect(), shares: shares.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{disk, net, share};
    use std::os::unix::fs::FileExt;

    #[test]
    fn each_device_has_its_counters() {
        let file = File::from(create().unwrap());
        assert!(file.set_len(1).is_err() && file.set_len(1 << 20).is_err(), "it is sealed");
        let put = |device: usize, op: usize, value: u64| {
            let words = [value, 1, value << 9, 9, 7, 0, value].map(u64::to_le_bytes);
            file.write_all_at(words.as_flattened(), VmCounters::offset(device, op)).unwrap();
        };
        let config = Config {
            disk: vec![disk::parse("/a").unwrap(), disk::parse("/b,id=data").unwrap()],
            net: vec![net::parse("none").unwrap(), net::parse("user").unwrap()],
            share: vec![share::parse("/a:one").unwrap(), share::parse("/b:two").unwrap()],
            ..Config::default()
        };
        put(1, op::WRITE, 5);
        put(MAX_QUEUES, op::TRANSMIT, 6);
        put(MAX_DISKS + 1, op::OTHER, 7);
        let DeviceStatistics { disks, nets, shares } = DeviceStatistics::read(&config, Some(&file));
        let names: Vec<_> = disks.iter().map(|disk| &disk.name[..]).collect();
        assert_eq!(names, ["disk0", "data"]);
        let histogram = LatencyHistogram::from(vec![0, 5]);
        let bytes = 5 << 9;
        let wanted = Requests { requests: 5, failed: 1, bytes, time_ns: 9, max_ns: 7, histogram };
        assert_eq!((disks[0].write, disks[1].write), (Requests::default(), wanted));
        assert_eq!((nets.len(), &nets[0].name[..], nets[0].transmit.frames), (1, "net0", 6));
        assert_eq!(nets[0].transmit.histogram, LatencyHistogram::from(vec![0, 6]));
        assert_eq!((&shares[1].tag[..], shares[1].other.requests), ("two", 7));
        assert_eq!((shares[0].other, nets[0].receive), Default::default());
        assert_eq!(DeviceStatistics::read(&config, None).disks[1].write, Requests::default());
    }
}
