//! Servers with devices, their clients and restarts.

use super::{BOTH_ARCHITECTURES, base, linux, micro, task};
use crate::scenario::{Scenario, Step};
use crate::system::Machine;

/// Disk servers and switches, with programs in place of VMMs that check what they get.
pub fn server_scenarios() -> Vec<Scenario> {
    let client = |name: &str, program: &str, command_line: &str, more: &str| {
        let vmm = format!("vmm = \"check-{program}\"\ncmdline = \"{command_line}\"\n{more}");
        micro(name, "hello", &vmm)
    };
    let server = |name: &str, kind: &str, device: &str| {
        let device = match device {
            "" => String::new(),
            device => format!("device = \"{device}:0\"\n"),
        };
        format!("\n[[server]]\nname = \"{name}\"\nkind = \"{kind}\"\n{device}")
    };
    let one = "disk = [\"blk0:part1\"]";
    let two = "disk = [\"blk0:part2\"]";
    let three = "disk = [\"blk1:part1\"]";
    let block = server("blk0", "block", "virtio-blk");
    let first = "disk = [\"first.img\"]\n";
    let killer = |server: &str, count: &str, pause: &str| {
        let more = "manage = true\nessential = true";
        task(&format!("killer-{server}"), "check-killer", &[server, count, pause], more)
    };
    let hostile = format!("{block}program = \"check-dma\"\n");
    // It goes through a whole life after whatever happens beside it, for as long as the operator
    // likes.
    let witness = micro("witness", "stress", "essential = false\nrestart = \"always\"")
        + &task("steward", "steward", &[], "console = \"mux\"\nmanage = true");
    let pong = client("pong", "net", "pong", "net = [\"sw0\"]\nessential = false");
    // Written data is read back from the disk, not from memory, and the network peer answers.
    let command = "parador.run=\\\"dd if=/dev/urandom of=/tmp/a bs=64k count=32 && \
                   dd if=/tmp/a of=/dev/vda bs=64k conv=fsync && echo 3 > /proc/sys/vm/drop_caches && \
                   dd if=/dev/vda of=/tmp/b bs=64k count=32 && cmp /tmp/a /tmp/b && \
                   ifconfig eth0 10.0.2.15 && ping -c 2 10.0.2.2 && \
                   dd if=/dev/hwrng bs=16 count=1 | wc -c | grep -x 16 && \
                   echo devices $((6 * 7))\\\"";
    let devices = "console = \"com1\"\ndisk = [\"blk0:part1\"]\nnet = [\"sw0\"]";
    vec![
        Scenario {
            cpus: &[1, 2],
            backends: BOTH_ARCHITECTURES,
            texts: vec!["devices 42".into(), "restart 5 of blk0".into()],
            limit: 240,
            ..base(
                "linux-disk-and-network",
                first.to_owned()
                    + "net = [\"user\"]\n"
                    + &block
                    + &server("sw0", "switch", "virtio-net")
                    + &killer("blk0", "5", "500")
                    + &linux("linux", command, devices),
            )
        },
        Scenario {
            // The shell routes interrupts to CPU 1; on x86-64 Linux has done so with the disk's.
            // The servers signal this vCPU, not the first one.
            cpus: &[2],
            backends: BOTH_ARCHITECTURES,
            steps: vec![
                Step::Console(" # "),
                Step::Type(
                    "for irq in $(awk '/virtio/ { print $1 + 0 }' /proc/interrupts); \
                     do echo 1 >/proc/irq/$irq/smp_affinity_list && echo moved; done\n",
                ),
                Step::Console("moved"),
                Step::Console("moved"),
                Step::Console(" # "),
                Step::Type(
                    "dd if=/dev/vda of=/dev/null bs=4k count=150 iflag=direct && \
                     ifconfig eth0 10.0.2.15 && for i in $(seq 10); do ping -c 1 10.0.2.2; done | \
                     grep -c '1 packets received'; grep virtio /proc/interrupts\n",
                ),
                Step::Console("\n10"),
                Step::Console(" # "),
                Step::Type("poweroff\n"),
            ],
            counters: &[("server_events", 100..=10_000), ("server_events_elsewhere", 0..=20)],
            limit: 240,
            ..base(
                "completions-of-second-vcpu",
                first.to_owned()
                    + "net = [\"user\"]\n"
                    + &block
                    + &server("sw0", "switch", "virtio-net")
                    + &linux("linux", "isolcpus=managed_irq,0", &format!("cpus = 2\n{devices}")),
            )
        },
        Scenario {
            cpus: &[1, 2],
            never: &["FAIL"],
            ..base(
                "disks",
                "disk = [\"first.img\", \"second.img,bus=ahci\"]\n".to_owned()
                    + &block
                    + &server("blk1", "block", "pci:ahci")
                    + &client("one", "disk", "3000 1", one)
                    + &client("two", "disk", "3000 2", two)
                    + &client("three", "disk", "3000 3", three),
            )
        },
        Scenario {
            cpus: &[1, 2],
            backends: BOTH_ARCHITECTURES,
            texts: vec!["CHECK killer ok".into(), "restart 20 of blk0".into()],
            never: &["FAIL"],
            limit: 240,
            ..base(
                "disk-server-restarts",
                first.to_owned()
                    + &block
                    + &killer("blk0", "20", "100")
                    + &client("one", "disk", "40000 1", one)
                    + &client("two", "disk", "40000 2", two),
            )
        },
        Scenario {
            // A server of an AHCI disk reads other values from registers once root has switched
            // the controller off. The disk is so slow that commands are always in flight.
            cpus: &[2],
            backends: BOTH_ARCHITECTURES,
            machine: Machine {
                qemu: &["-set", "drive.disk1.throttling.iops-total=4000"],
                ..Machine::default()
            },
            texts: vec!["CHECK killer ok".into(), "restart 40 of blk1".into()],
            never: &["FAIL"],
            limit: 240,
            ..base(
                "ahci-server-restarts",
                "iommu = true\ndisk = [\"first.img\", \"second.img,bus=ahci\"]\n".to_owned()
                    + &block
                    + &server("blk1", "block", "pci:ahci")
                    + &killer("blk1", "40", "100")
                    + &client("one", "disk", "20000 1", one)
                    + &client("three", "disk", "20000 3", three),
            )
        },
        Scenario {
            cpus: &[1, 2],
            backends: BOTH_ARCHITECTURES,
            texts: vec!["CHECK ping ok".into(), "CHECK spoof ok".into(), "CHECK arp ok".into()],
            never: &["FAIL"],
            ..base(
                "switch",
                "net = [\"user\"]\n".to_owned()
                    + &server("sw0", "switch", "virtio-net")
                    + &client("ping", "net", "ping 500", "net = [\"sw0\"]")
                    + &pong
                    + &client("spoof", "net", "spoof", "net = [\"sw0\"]")
                    + &client("arp", "net", "arp", "net = [\"sw0,group=2\"]")
                    + &client(
                        "silent",
                        "net",
                        "silent",
                        "net = [\"sw0,group=3\"]\nessential = false",
                    ),
            )
        },
        Scenario {
            // Servers of both kinds of disks, one of which is killed, behind an IOMMU.
            cpus: &[1, 2],
            backends: BOTH_ARCHITECTURES,
            texts: vec!["IOMMU at 0x".into(), "restart 5 of blk0".into()],
            never: &["FAIL", "IOMMU: event"],
            limit: 240,
            ..base(
                "disks-behind-iommu",
                "iommu = true\ndisk = [\"first.img\", \"second.img,bus=ahci\"]\n".to_owned()
                    + &block
                    + &server("blk1", "block", "pci:ahci")
                    + &killer("blk0", "5", "200")
                    + &client("one", "disk", "20000 1", one)
                    + &client("three", "disk", "3000 3", three),
            )
        },
        Scenario {
            // A switch that has turned its network card on, and finds no memory for its last
            // clients.
            machine: Machine { qemu: &["-m", "10M"], ..Machine::default() },
            texts: vec![
                "root: server drives PCI function 00:".into(),
                "cannot start server sw0: Memory".into(),
                " is disabled".into(),
            ],
            code: 65,
            ..base(
                "server-cannot-start",
                "net = [\"user\"]\n".to_owned()
                    + &server("sw0", "switch", "virtio-net")
                    + &(0..4)
                        .map(|vm| {
                            let nets = "net = [\"sw0\", \"sw0\", \"sw0\", \"sw0\"]";
                            micro(&format!("vm-{vm}"), "hello", nets)
                        })
                        .collect::<String>(),
            )
        },
        Scenario {
            // A virtual machine in the place of one that had a disk: neither it nor the disk's
            // server learns of the other, when that is started again.
            cpus: &[1, 2],
            steps: vec![
                Step::Console("steward> "),
                Step::Type("destroy old\r"),
                Step::Console("destroy old: done"),
                Step::Type("create new small\r"),
                Step::Console("create new: done"),
                Step::Type("start new\r"),
                Step::Console("start new: done"),
                Step::Log("new: probes for 5000 ms"),
                Step::Type("restart blk0\r"),
                Step::Console("restart blk0: done"),
                Step::Log("new: CHECK stranger ok"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["FAIL"],
            ..base(
                "session-of-a-destroyed-guest",
                first.to_owned()
                    + &block
                    + &task("steward", "steward", &[], "console = \"mux\"\nmanage = true")
                    + &micro("old", "spin", &format!("essential = false\n{one}"))
                    + &micro("small", "hello", "vmm = \"check-stranger\"\ntemplate = true"),
            )
        },
        Scenario {
            // A guest that never stops, above all others, with a budget: two virtual CPUs, each
            // with its part.
            cpus: &[1, 2],
            texts: vec!["vm witness ended: power-off code 0".into()],
            never: &["FAIL"],
            ..base(
                "budgets",
                String::new()
                    + &micro(
                        "hog",
                        "spin",
                        "priority = 50\nessential = false\ncpus = 2\n\
                         cpu = { budget = \"2ms\", period = \"10ms\" }",
                    )
                    + &task(
                        "neighbour",
                        "check-neighbour",
                        &[],
                        "essential = false\npriority = 51\n\
                         cpu = { budget = \"1ms\", period = \"5ms\" }",
                    )
                    + &micro("witness", "stress", ""),
            )
        },
        Scenario {
            // A server that programs its device to access kernel memory, and to send interrupts.
            steps: vec![
                Step::Console("steward> "),
                Step::Log("the disk cannot read and cannot write what is not its server's"),
                Step::Log("CHECK dma ok"),
                Step::Log("the disk cannot send interrupts of its choice"),
                Step::Log("CHECK messages ok"),
                Step::Log("vm witness started"),
                Step::Log("vm witness ended: power-off code 0"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["FAIL"],
            ..base(
                "hostile-device-behind-iommu",
                format!("iommu = true\n{first}") + &hostile + &witness,
            )
        },
        Scenario {
            // Without an IOMMU it can: this is what the one before shows.
            steps: vec![
                Step::Console("steward> "),
                Step::Log("the disk can read and can write what is not its server's"),
                Step::Log("the disk can send interrupts of its choice"),
                Step::Log("CHECK messages ok"),
                Step::Log("vm witness started"),
                Step::Log("vm witness ended: power-off code 0"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["FAIL"],
            ..base("hostile-device", first.to_owned() + &hostile + &witness)
        },
        Scenario {
            // A hostile driver in a guest, beside clients of the same servers that notice wrong
            // data.
            cpus: &[1, 4],
            texts: vec![
                "all devices work".into(),
                "CHECK disk ok".into(),
                "CHECK ping ok".into(),
                "vm hostile ended: power-off code 0".into(),
            ],
            never: &["FAIL"],
            limit: 240,
            ..base(
                "hostile-rings",
                first.to_owned()
                    + &block
                    + &server("sw0", "switch", "")
                    + &micro(
                        "hostile",
                        "hostile-rings",
                        &format!("console = \"com1\"\n{one}\nnet = [\"sw0\"]"),
                    )
                    + &client("two", "disk", "20000 2", two)
                    + &client("ping", "net", "ping 3000", "net = [\"sw0\"]")
                    + &pong,
            )
        },
        Scenario {
            cpus: &[2],
            backends: BOTH_ARCHITECTURES,
            texts: vec!["CHECK ping ok".into(), "restart 10 of sw0".into()],
            never: &["FAIL"],
            limit: 240,
            ..base(
                "switch-restarts",
                server("sw0", "switch", "")
                    + &killer("sw0", "10", "100")
                    + &client("ping", "net", "ping 3000", "net = [\"sw0\"]")
                    + &pong,
            )
        },
    ]
}
