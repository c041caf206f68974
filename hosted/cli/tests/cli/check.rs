//! `parador system check`: every rule with its place, message and exit code.

use crate::support::{Folder, ONE_VM, bzimage, code, errors, image_arm64};

/// Runs `system check` on a description beside a good kernel, a cut-short one and a RAM disk.
pub fn check(description: &str) -> (i32, String) {
    let folder = Folder::new(description);
    folder.write("kernel", &bzimage());
    folder.write("short", &bzimage()[..1200]);
    folder.write("text", b"no kernel at all");
    folder.write("initrd", &[0; 100]);
    let output = folder.parador(&["system", "check", "system.toml"]).output().unwrap();
    (code(&output), errors(&output))
}

/// `description` is refused with this exit code; the message starts so.
pub fn refused(description: &str, expected_code: i32, start: &str) {
    let (code, errors) = check(description);
    assert!(errors.starts_with(start), "{description}\nexpected {start}\ngot {errors}");
    assert_eq!(code, expected_code, "{description}\n{errors}");
    assert!(errors.contains("\n      | "), "no caret\n{errors}");
}

pub fn system(lines: &str) -> String {
    format!("{ONE_VM}cpus = 1\n").replacen("\n\n", &format!("\n{lines}\n\n"), 1)
}

pub fn vm(lines: &str) -> String {
    format!("{ONE_VM}{lines}\n")
}

#[test]
fn a_good_description_and_what_was_proved() {
    let folder = Folder::new(ONE_VM);
    folder.write("kernel", &bzimage());
    let output = folder.parador(&["system", "check", "system.toml"]).output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert!(text.starts_with("system.toml: no problem found\n"), "{text}");
    assert!(text.contains("com2: kernel log; com1: server console for linux"), "{text}");
    assert!(text.contains("1 vCPU on 1 CPU, none shared"), "{text}");
}

#[test]
fn the_examples_are_good() {
    let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let folder = Folder::new("");
    for entry in std::fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            let output =
                folder.parador(&["system", "check", path.to_str().unwrap()]).output().unwrap();
            let errors = errors(&output);
            // Kernels and RAM disks that a command creates may be missing; the message names the
            // command.
            let unmade = errors.matches("` creates it\n").count();
            let wrong = errors.matches(": error: ").count() - unmade;
            assert_eq!(wrong, 0, "{}: {errors}", path.display());
            assert_eq!(
                code(&output),
                if unmade == 0 { 0 } else { 66 },
                "{}: {errors}",
                path.display()
            );
        }
    }
}

#[test]
fn toml_and_schema() {
    refused("[system\n", 65, "system.toml:1:8: error: ");
    refused(
        "[system]\nboard = \"qemu-q35\"\nlogs = \"com2\"\n",
        65,
        "system.toml:3:1: error: unknown field `logs`, expected one of `board`, `log`",
    );
    refused(&vm("memroy = \"1G\""), 65, "system.toml:9:1: error: unknown field `memroy`");
    refused(&vm("vtlb = \"1M\""), 65, "system.toml:9:8: error: `vtlb` belongs to a virtual");
    refused(&vm("npt = false\nrung = \"top\""), 65, "system.toml:10:8: error: no rung `top`");
    refused(&vm("cpus = { pins = [0] }"), 65, "system.toml:9:10: error: unknown field `pins`");
    refused(&format!("{ONE_VM}[[chanel]]\n"), 65, "system.toml:9:3: error: unknown field `chanel`");
    refused(
        "[system]\nboard = \"amiga\"\n",
        65,
        "system.toml:2:9: error: unknown variant `amiga`, expected one of `qemu-q35`, `pc`, `qemu-virt`",
    );
    refused(
        "[system]\nboard = \"pc\"\n[[vm]]\nname = \"a\"\nkernel = \"kernel\"\n",
        65,
        "system.toml:3:1: error: missing field `memory`",
    );
    refused(
        &vm("cpus = \"two\""),
        65,
        "system.toml:9:8: error: invalid type: string \"two\", expected a number of CPUs",
    );
    refused(
        &ONE_VM.replace("\"64M\"", "64"),
        65,
        "system.toml:6:10: error: invalid type: integer `64`, expected a size in quotes with a unit",
    );
    refused(&ONE_VM.replace("64M", "64MB"), 65, "system.toml:6:10: error: invalid size `64MB`");
    refused(
        "[system]\nboard = \"pc\"\n",
        65,
        "system.toml:1:1: error: the system has no virtual machine and no task",
    );
}

#[test]
fn names() {
    refused(
        &ONE_VM.replace("\"linux\"", "\"Linux\""),
        65,
        "system.toml:5:8: error: invalid name `Linux`",
    );
    refused(&ONE_VM.replace("\"linux\"", "\"\""), 65, "system.toml:5:8: error: invalid name ``");
    refused(
        &ONE_VM.replace("linux", &"a".repeat(32)),
        65,
        "system.toml:5:8: error: invalid name `aaaa",
    );
    let twice = format!("{ONE_VM}[[task]]\nname = \"linux\"\nbinary = \"check-hostile\"\n");
    refused(&twice, 65, "system.toml:5:8: error: duplicate task or virtual machine name `linux`");
    let path = format!("{ONE_VM}[[task]]\nname = \"t\"\nbinary = \"../check\"\n");
    refused(&path, 65, "system.toml:11:10: error: `../check` is not the name of a binary");
}

#[test]
fn devices_have_one_owner() {
    refused(
        &system("log = \"com1\""),
        65,
        "system.toml:9:11: error: com1 already belongs to the kernel log",
    );
    let server = "[[server]]\nname = \"a\"\nkind = \"console\"\ndevice = \"com1\"\n";
    let servers = format!("{ONE_VM}{server}{}", server.replace("\"a\"", "\"b\""));
    refused(&servers, 65, "system.toml:16:10: error: com1 already belongs to server `a`");
    refused(
        &format!("{}{server}", system("log = \"com1\"")),
        65,
        "system.toml:14:10: error: com1 already belongs to the kernel log",
    );
    let second =
        "[[vm]]\nname = \"b\"\nmemory = \"64M\"\nkernel = \"kernel\"\nconsole = \"com1\"\n";
    refused(
        &format!("{ONE_VM}{second}"),
        65,
        "system.toml:13:11: error: com1 is already the console of `linux`",
    );
    refused(
        &format!("{ONE_VM}{}", server.replace("com1", "com9")),
        65,
        "system.toml:12:10: error: invalid device `com9`",
    );
}

#[test]
fn disks_and_networks() {
    let server = |name: &str, kind: &str, device: &str| {
        format!("[[server]]\nname = \"{name}\"\nkind = \"{kind}\"\ndevice = \"{device}\"\n")
    };
    let block = server("blk0", "block", "pci:virtio-blk:0");
    let switch = "[[server]]\nname = \"sw0\"\nkind = \"switch\"\nports = [\"linux\"]\n";
    let machine = system("disk = [\"a.img\"]\nnet = [\"user,hostfwd=tcp:2222:22\"]");
    let good =
        format!("{machine}disk = [\"blk0:part1\"]\nnet = [\"sw0,group=1\"]\n{block}{switch}");
    let folder = Folder::new(&good);
    folder.write("kernel", &bzimage());
    let output = folder.parador(&["system", "check", "system.toml"]).output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert!(
        text.contains("pci:virtio-blk:0: server blk0 for linux; server sw0 for linux"),
        "{text}"
    );

    let wrong = |description: &str, message: &str| {
        let (code, errors) = check(description);
        assert_eq!(code, 65, "{errors}");
        assert!(errors.contains(message), "expected {message}\ngot {errors}");
        assert!(errors.contains("\n      | "), "no caret\n{errors}");
    };
    wrong(&good.replace("blk0:part1", "blk1"), "no such disk server: `blk1`");
    wrong(&good.replace("blk0:part1", "sw0"), "no such disk server: `sw0`");
    wrong(&good.replace("blk0:part1", "blk0:x"), "invalid part of a disk `x`");
    wrong(
        &good.replace("\"blk0:part1\"", "\"blk0:part1\", \"blk0,ro\""),
        "these sectors already belong to",
    );
    wrong(&good.replace("virtio-blk:0", "virtio-blk:1"), "the machine has no pci:virtio-blk:1");
    wrong(
        &good.replace("virtio-blk:0", "virtio-net:0"),
        "server `blk0` cannot drive pci:virtio-net:0",
    );
    wrong(&good.replace("device = \"pci:virtio-blk:0\"\n", ""), "server `blk0` has no device");
    wrong(
        &good.replace("ports = [\"linux\"]", "ports = [\"other\"]"),
        "no such virtual machine: `other`",
    );
    wrong(
        &good.replace("ports = [\"linux\"]", "ports = []"),
        "`linux` is not a port of switch `sw0`",
    );
    wrong(&good.replace("sw0,group=1", "sw0,group=x"), "unknown option `group=x`");
    let same = "mac=02:00:00:00:00:01";
    let two = format!("\"sw0,{same}\", \"sw0,{same}\"");
    wrong(&good.replace("\"sw0,group=1\"", &two), "another network card has this address");
    wrong(
        &format!("{good}{}", server("b", "block", "pci:virtio-blk:0")),
        "already belongs to server `blk0`",
    );
}

/// A system for AArch64 with a disk and a network.
pub const ARM64: &str = "\
[system]
board = \"qemu-virt\"
disk = [\"a.img\"]
net = [\"user\"]

[[server]]
name = \"blk0\"
kind = \"block\"
device = \"virtio-blk:0\"

[[server]]
name = \"sw0\"
kind = \"switch\"
device = \"mmio:virtio-net:0\"

[[vm]]
name = \"linux\"
memory = \"64M\"
kernel = \"kernel\"
disk = [\"blk0\"]
net = [\"sw0\"]
";

/// Checks a description whose guests start an image of AArch64; returns exit code, output and
/// errors.
fn check_image(description: &str) -> (i32, String, String) {
    let folder = Folder::new(description);
    folder.write("kernel", &image_arm64());
    let output = folder.parador(&["system", "check", "system.toml"]).output().unwrap();
    (code(&output), String::from_utf8_lossy(&output.stdout).into_owned(), errors(&output))
}

#[test]
fn disks_and_networks_of_aarch64() {
    let (code, text, errors) = check_image(ARM64);
    assert_eq!(code, 0, "{errors}");
    let devices = "mmio:virtio-blk:0: server blk0 for linux; mmio:virtio-net:0: server sw0";
    assert!(text.contains(devices), "{text}");
    for (from, to, message) in [
        ("virtio-blk:0", "pci:virtio-blk:0", "has devices on PCI with `iommu = true` only"),
        ("virtio-blk:0", "pci:ahci:0", "has devices on PCI with `iommu = true` only"),
        ("virtio-blk:0", "virtio-blk:1", "the machine has no mmio:virtio-blk:1"),
        ("a.img", "a.img,bus=ahci", "board \"qemu-virt\" has no AHCI controller"),
        (
            "\"a.img\"",
            "\"a.img\", \"b.img\", \"c.img\"",
            "board \"qemu-virt\" has room for 3 disks and network cards (got 4)",
        ),
    ] {
        assert!(ARM64.contains(from));
        let (code, _, errors) = check_image(&ARM64.replacen(from, to, 1));
        assert_eq!(code, 65, "{errors}");
        assert!(errors.contains(message), "expected {message}\ngot {errors}");
        assert!(errors.contains("\n      | "), "no caret\n{errors}");
    }
    // Behind an IOMMU they are on PCI, which has an interrupt line for each of four; all disks of
    // the AHCI controller share one.
    let guarded = ARM64
        .replacen("\n\n", "\niommu = true\n\n", 1)
        .replace("mmio:", "")
        .replace("\"a.img\"", "\"a.img\", \"b.img,bus=ahci\", \"c.img,bus=ahci\", \"d.img\"");
    let (code, text, errors) = check_image(&guarded);
    assert_eq!(code, 0, "{errors}");
    let devices = "pci:virtio-blk:0: server blk0 for linux; pci:virtio-net:0: server sw0";
    assert!(text.contains(devices), "{text}");
    for (from, to, message) in [
        ("virtio-blk:0", "mmio:virtio-blk:0", "with `iommu = true`, all devices are on PCI"),
        ("\"d.img\"", "\"d.img\", \"e.img\"", "has room for 4 disks and network cards (got 5)"),
    ] {
        let (code, _, errors) = check_image(&guarded.replacen(from, to, 1));
        assert_eq!(code, 65, "{errors}");
        assert!(errors.contains(message), "expected {message}\ngot {errors}");
    }
    // A PC has the same names, and no devices over MMIO.
    let pc = ARM64.replace("qemu-virt", "qemu-q35");
    refused(&pc, 65, "system.toml:14:10: error: a PC has no virtio devices over MMIO");
    let (code, errors) = check(&pc.replace("mmio:", ""));
    assert_eq!(code, 0, "{errors}");
}

#[test]
fn devices_that_guests_drive_themselves() {
    let start = ARM64.find("[[server]]").unwrap();
    let machine = &ARM64[..start];
    let vm = |name: &str, more: &str| {
        format!("[[vm]]\nname = \"{name}\"\nmemory = \"64M\"\nkernel = \"kernel\"\n{more}\n")
    };
    let all = "devices = [\"com1\", \"virtio-blk:0\"]\ntrusted = true";
    let (status, text, error) = check_image(&format!("{machine}{}", vm("a", all)));
    assert_eq!(status, 0, "{error}");
    assert!(text.contains("; com1: a itself; mmio:virtio-blk:0: a itself"), "{text}");
    // A UART needs no trust.
    let uart = vm("a", "devices = [\"com1\"]");
    assert_eq!(check_image(&format!("{machine}{uart}")).0, 0);
    let disk = "[[server]]\nname = \"blk0\"\nkind = \"block\"\ndevice = \"virtio-blk:0\"\n";
    let guarded = machine.replacen("\n\n", "\niommu = true\n\n", 1);
    let logged = machine.replacen("\n\n", "\nlog = \"com1\"\n\n", 1);
    // The IOMMU restricts a device on PCI.
    let on_pci = format!("{guarded}{}", vm("a", "devices = [\"virtio-blk:0\"]"));
    let (status, text, error) = check_image(&on_pci);
    assert_eq!(status, 0, "{error}");
    assert!(text.contains("pci:virtio-blk:0: a itself"), "{text}");
    for (description, message) in [
        (
            format!("{machine}{}", vm("a", "devices = [\"virtio-blk:0\"]")),
            "mmio:virtio-blk:0 can access all memory of the machine",
        ),
        (
            format!("{machine}{disk}{}", vm("a", all)),
            "mmio:virtio-blk:0 already belongs to server `blk0`",
        ),
        (
            format!("{machine}{}{}", vm("a", all), vm("b", all)),
            "com1 already belongs to virtual machine `a`",
        ),
        (
            format!("{machine}{uart}{}", vm("b", "console = \"com1\"")),
            "com1 already belongs to server `console`",
        ),
        (format!("{logged}{uart}"), "com1 already belongs to the kernel log"),
        (
            format!("{guarded}{}", vm("a", "devices = [\"pci:ahci:0\"]")),
            "a guest cannot drive pci:ahci:0 itself",
        ),
        (
            format!("{guarded}{}", vm("a", "devices = [\"mmio:virtio-blk:0\"]")),
            "with `iommu = true`, all devices are on PCI",
        ),
        (
            format!("{guarded}{disk}{}", vm("a", "devices = [\"virtio-blk:0\"]")),
            "pci:virtio-blk:0 already belongs to server `blk0`",
        ),
        (
            format!("{machine}{}", vm("a", "devices = [\"virtio-blk:1\"]\ntrusted = true")),
            "the machine has no mmio:virtio-blk:1",
        ),
        (
            format!("{machine}{uart}template = true\n"),
            "a template cannot have devices of the machine",
        ),
        (
            format!("{machine}{uart}").replace("qemu-virt", "qemu-q35"),
            "only guests of board \"qemu-virt\" can drive devices themselves",
        ),
    ] {
        let (status, _, error) = check_image(&description);
        assert_eq!(status, 65, "{description}\n{error}");
        assert!(error.contains(message), "expected {message}\ngot {error}");
    }
}

#[test]
fn a_shared_console() {
    let task = "[[task]]\nname = \"steward\"\nbinary = \"check-hostile\"\nmanage = true\n";
    let other = "[[vm]]\nname = \"b\"\nmemory = \"64M\"\nkernel = \"kernel\"\n";
    let shared = "console = \"mux\"\n";
    let first = ONE_VM.replace("com1\"", "mux\"");
    let folder = Folder::new(&format!("{first}\n{task}{shared}{other}{shared}template = true\n"));
    folder.write("kernel", &bzimage());
    let output = folder.parador(&["system", "check", "system.toml"]).output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert!(text.contains("com1: server console for steward, linux, b"), "{text}");
    assert!(text.contains("1 vCPU on 1 CPU, none shared"), "templates have none: {text}");
    // All share it, or one has it alone.
    refused(
        &format!("{ONE_VM}\n{other}{shared}"),
        65,
        "system.toml:14:11: error: com1 is already the console of `linux`",
    );
}

#[test]
fn cpus() {
    refused(&system("cpus = 0"), 65, "system.toml:3:8: error: cpus must be 1 to 288 (got 0)");
    let pinned = vm("cpus = { pin = [3] }").replacen("\n\n", "\ncpus = 2\n\n", 1);
    refused(&pinned, 65, "system.toml:10:17: error: the machine has no CPU 3, only 0 to 1");
    assert_eq!(check(&vm("cpus = 8").replacen("\n\n", "\ncpus = 8\n\n", 1)).0, 0);
    let twice = check(&vm("cpus = { pin = [1, 1] }")).1;
    assert!(twice.contains("system.toml:9:20: error: CPU 1 is listed twice"), "{twice}");
    refused(
        &vm("cpus = { pin = [] }"),
        65,
        "system.toml:9:8: error: a virtual machine must have 1 to 8 vCPUs (got 0)",
    );
    refused(
        &vm("cpus = 9"),
        65,
        "system.toml:9:8: error: a virtual machine must have 1 to 8 vCPUs (got 9)",
    );
    let wide = vm("cpus = 3").replacen("\n\n", "\ncpus = 2\n\n", 1);
    let wide = check(&wide).1;
    assert!(wide.contains("10:8: error: `linux` has 3 vCPUs, the machine has 2 CPUs"), "{wide}");
    let second = "[[vm]]\nname = \"b\"\nmemory = \"64M\"\nkernel = \"kernel\"\n";
    let two = format!("{}{second}cpus = 1\n", system("cpus = 1"));
    refused(&two, 65, "system.toml:15:8: error: no CPU left for `b`: 2 vCPUs so far on 1 CPU");
    assert_eq!(check(&two.replacen("cpus = 1", "cpus = 1\nshare_cpus = true", 1)).0, 0);
    let same = format!("{}{second}cpus = {{ pin = [0] }}\n", vm("cpus = { pin = [0] }"));
    refused(&same, 65, "system.toml:14:17: error: CPU 0 already belongs to `linux`");
    let task = format!(
        "{}[[task]]\nname = \"t\"\nbinary = \"check-hostile\"\ncpu = 1\n",
        system("cpus = 1")
    );
    refused(&task, 65, "system.toml:13:10: error: task `t`: the machine has no CPU 1, only CPU 0");
}

#[test]
fn memory() {
    refused(
        &system("memory = \"64M\""),
        65,
        "system.toml:3:10: error: not enough memory (64 MiB): guests need 64 MiB, boot files",
    );
    assert_eq!(check(&system("memory = \"128M\"")).0, 0);
    refused(
        &ONE_VM.replace("64M", "16M"),
        65,
        "system.toml:6:10: error: 16 MiB of memory is not enough for the kernel of `linux`",
    );
    assert!(check(&ONE_VM.replace("64M", "16M")).1.contains("help: give it at least 17M\n"));
    refused(
        &ONE_VM.replace("64M", "0M"),
        65,
        "system.toml:6:10: error: guest memory must be a multiple of 1 MiB",
    );
    refused(
        &ONE_VM.replace("64M", "65537K"),
        65,
        "system.toml:6:10: error: guest memory must be a multiple",
    );
    refused(
        &ONE_VM.replace("\"kernel\"", "\"debian\"").replace("64M", "8M"),
        65,
        "system.toml:6:10: error: 8 MiB of memory is not enough",
    );
    // Sums beyond 64 bits are not small.
    for size in ["17179869183G", "65537G"] {
        refused(
            &ONE_VM.replace("64M", size),
            65,
            "system.toml:6:10: error: guest memory must be at most 65536 GiB",
        );
    }
}

/// A number of vCPUs that is refused takes no time for each of them.
#[test]
fn many_vcpus() {
    refused(
        &vm("cpus = 4294967295\ncpu = { budget = \"1ms\", period = \"10ms\" }"),
        65,
        "system.toml:9:8: error: a virtual machine must have 1 to",
    );
}

/// QEMU would refuse the machine.
#[test]
fn disks_and_ports_that_are_used_twice() {
    for (lines, message) in [
        ("disk = [\"a.img\", \"./a.img,ro=on\"]", "another disk has the same file"),
        (
            "net = [\"user,hostfwd=tcp:2:22,hostfwd=tcp:2:23\"]",
            "the host's port in tcp:127.0.0.1:2",
        ),
        ("net = [\"user,hostfwd=udp:2:1\", \"user,hostfwd=udp:2:2\"]", "the host's port in udp"),
    ] {
        let (code, errors) = check(&system(lines));
        assert!(code == 65 && errors.contains(message), "{lines}: {code} {errors}");
    }
    for lines in [
        "disk = [\"a.img,ro=on\", \"a.img,snapshot=on\", \"b.img\"]",
        "net = [\"user,hostfwd=tcp:2:22,hostfwd=udp:2:22\"]",
    ] {
        let errors = check(&system(lines)).1;
        assert!(!errors.contains("same file") && !errors.contains("twice"), "{lines}: {errors}");
    }
}

#[test]
fn transports() {
    let with =
        |more: &str| ONE_VM.replace("memory = \"64M\"", &format!("memory = \"64M\"\n{more}"));
    refused(
        &with("transport = \"mmio\""),
        65,
        "system.toml:7:13: error: a PC has no virtio devices with transport mmio",
    );
    assert_eq!(check(&with("transport = \"pci\"")).0, 0);
    let arm = with("transport = \"mmio\"").replace("qemu-q35", "qemu-virt");
    assert!(!check(&arm).1.contains("transport"));
}

#[test]
fn files() {
    refused(
        &ONE_VM.replace("\"kernel\"", "\"missing\""),
        66,
        "system.toml:7:10: error: cannot read the kernel missing: No such file",
    );
    refused(
        &vm("initrd = \"missing\""),
        66,
        "system.toml:9:10: error: cannot read the RAM disk missing",
    );
    refused(
        &ONE_VM.replace("\"kernel\"", "\"short\""),
        65,
        "system.toml:7:10: error: short: the kernel is truncated: it has 1200 bytes, at least 2032 are needed",
    );
    refused(
        &ONE_VM.replace("\"kernel\"", "\"text\""),
        65,
        "system.toml:7:10: error: text: the kernel is neither a bzImage nor an ELF file, and has no Multiboot header",
    );
    assert_eq!(check(&vm("initrd = \"initrd\"")).0, 0);
    let with_files = |names: &str| ONE_VM.replacen("\n\n", &format!("\nfiles = [{names}]\n\n"), 1);
    assert_eq!(check(&with_files("\"initrd\", \"text\"")).0, 0);
    refused(
        &with_files("\"initrd\", \"missing\""),
        66,
        "system.toml:3:20: error: cannot read the file missing",
    );
    refused(
        &with_files("\"text\", \"./text\""),
        65,
        "system.toml:3:18: error: another file has the same name as ./text",
    );
}

#[test]
fn programs() {
    let task = |binary: &str| format!("{ONE_VM}[[task]]\nname = \"t\"\nbinary = \"{binary}\"\n");
    refused(&task("nowhere"), 66, "system.toml:11:10: error: no binary `nowhere` in /");
    refused(&vm("vmm = \"other\""), 66, "system.toml:9:7: error: no binary `other` in /");
    assert_eq!(check(&task("check-hostile")).0, 0);
}

#[test]
fn other_values() {
    refused(&vm("priority = 64"), 65, "system.toml:9:12: error: priorities must be 0 to 63");
    refused(
        &vm("restart = \"sometimes\""),
        65,
        "system.toml:9:11: error: unknown variant `sometimes`",
    );
    refused(&vm("on_reset = \"panic\""), 65, "system.toml:9:12: error: unknown variant `panic`");
    refused(
        &vm(&format!("cmdline = \"{}\"", "a".repeat(2048))),
        65,
        "system.toml:9:11: error: the kernel command line has 2048 bytes",
    );
    refused(
        &vm("cmdline = \"a\\nb\""),
        65,
        "system.toml:9:11: error: the kernel command line must be one line",
    );
}

#[test]
fn all_problems_are_reported_at_once() {
    let (code, errors) = check(&vm("priority = 99\ncpus = 99\ninitrd = \"missing\""));
    assert_eq!(code, 65);
    for place in ["system.toml:9:12: ", "system.toml:10:8: ", "system.toml:11:10: "] {
        assert!(errors.contains(place), "{errors}");
    }
    assert!(errors.ends_with("system.toml: 3 problems\n"), "{errors}");
}

#[test]
fn the_file_itself() {
    let folder = Folder::new("");
    let run = |file: &str| {
        let output = folder.parador(&["system", "check", file]).output().unwrap();
        (code(&output), errors(&output))
    };
    let (code, errors) = run("absent.toml");
    assert_eq!(
        (code, errors.as_str()),
        (66, "parador: error: cannot read absent.toml: No such file or directory\n")
    );
    folder.write("binary.toml", &[0xff, 0xfe, 0]);
    let (code, errors) = run("binary.toml");
    assert_eq!((code, errors.as_str()), (65, "parador: error: binary.toml is not UTF-8 text\n"));
    assert_eq!(run("programs").0, 71);
}

#[test]
fn usage() {
    let folder = Folder::new("");
    let run = |arguments: &[&str]| {
        let output = folder.parador(arguments).output().unwrap();
        (code(&output), errors(&output))
    };
    let (code, errors) = run(&["system", "chekc"]);
    assert_eq!(code, 64);
    assert!(errors.contains("similar") && errors.contains("'check'"), "{errors}");
    let (code, errors) = run(&["system", "emulate", "system.toml", "--timeuot", "1s"]);
    assert_eq!(code, 64);
    assert!(errors.contains("'--timeout'"), "{errors}");
    assert_eq!(run(&["system", "emulate", "system.toml", "--timeout", "soon"]).0, 64);
    assert_eq!(run(&["system", "emulate", "system.toml", "-m", "lots"]).0, 64);
    assert_eq!(run(&[]).0, 64);
    assert_eq!(run(&["--help"]).0, 0);
    assert_eq!(run(&["--version"]).0, 0);
}

#[test]
fn channels() {
    let two = |channels: &str| {
        let other = "[[vm]]\nname = \"other\"\nmemory = \"32M\"\nkernel = \"kernel\"\ncpus = 1\n";
        format!("{ONE_VM}cpus = 1\n{other}{channels}")
    };
    let channel = |between: &str, size: &str| {
        two(&format!("[[channel]]\nbetween = [{between}]\nkind = \"shmem\"\nsize = \"{size}\"\n"))
    };
    let good = "\"linux\", \"other\"";
    let (code, errors) = check(&channel(good, "16M"));
    assert_eq!(code, 0, "{errors}");
    let refused = |description: &str, message: &str| {
        let (code, errors) = check(description);
        assert!(errors.contains(message), "{description}\nexpected {message}\ngot {errors}");
        assert_eq!(code, 65, "{errors}");
        assert!(errors.starts_with("system.toml:") && errors.contains("\n      | "), "{errors}");
    };
    refused(&channel("\"linux\"", "1M"), "connects two virtual machines (got 1)");
    refused(
        &channel("\"linux\", \"linux\"", "1M"),
        "a channel must connect two different virtual machines",
    );
    refused(&channel("\"linux\", \"lunix\"", "1M"), "no such virtual machine: `lunix`");
    for size in ["8K", "3M", "32M", "0K"] {
        refused(&channel(good, size), "invalid channel size");
    }
    let one = "[[channel]]\nbetween = [\"linux\", \"other\"]\nkind = \"shmem\"\nsize = \"1M\"\n";
    refused(&two(&one.repeat(5)), "has too many channels (limit 4)");
    refused(&two(&one.replace("shmem", "pipe")), "unknown variant `pipe`");
    refused(&two(&one.replace("size", "seize")), "unknown field");
    let template =
        two(one).replacen("cpus = 1\n[[channel]]", "cpus = 1\ntemplate = true\n[[channel]]", 1);
    refused(&template, "`other` is a template");
}
