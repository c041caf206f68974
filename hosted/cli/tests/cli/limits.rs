//! Limits in descriptions whose values come from elsewhere than from the key that has the limit.

use crate::check::{ARM64, check, refused, system, vm};
use crate::support::{Folder, ONE_VM, bzimage, code, errors, image_arm64};
use std::fs::File;

fn server(name: &str) -> String {
    format!("[[server]]\nname = \"{name}\"\nkind = \"switch\"\n")
}

#[test]
fn the_server_of_a_used_console_counts() {
    let servers = |count: usize| (0..count).map(|index| server(&format!("s{index}")));
    let with = |count: usize| format!("{ONE_VM}{}", servers(count).collect::<String>());
    assert_eq!(check(&with(7)).0, 0);
    refused(
        &with(8),
        65,
        "system.toml:8:11: error: this console needs a server beside 8 others (limit 8)",
    );
    let (_, errors) = check(&with(9));
    assert!(errors.contains("9 servers (limit 8)") && !errors.contains("beside"), "{errors}");
    assert_eq!(check(&with(8).replace("\"com1\"", "\"none\"")).0, 0);
    refused(
        &format!("{ONE_VM}{}", server("console")),
        65,
        "system.toml:8:11: error: the server of this console is named `console`, too",
    );
}

#[test]
fn the_limit_of_cpus_is_that_of_the_board() {
    let of_arm64 = |lines: &str, arguments: &[&str]| {
        let folder = Folder::new(&format!("{ARM64}{lines}"));
        folder.write("kernel", &image_arm64());
        folder.write("a.img", &[0; 512]);
        let output = folder.emulate("exit 33", arguments).output().unwrap();
        (code(&output), errors(&output))
    };
    let is_refused = |(code, errors): (i32, String), message: &str| {
        assert_eq!(code, 65, "{errors}");
        assert!(errors.contains(message), "expected {message}\ngot {errors}");
    };
    is_refused(of_arm64("", &["--cpus", "100"]), "cpus must be 1 to 64 (got 100)");
    is_refused(of_arm64("", &["--arch", "arm64", "--cpus", "65"]), "cpus must be 1 to 64");
    let pinned = "cpus = { pin = [64] }\n";
    is_refused(of_arm64(pinned, &[]), "the machine has no CPU 64, only 0 to 63");
    let written = ARM64.replacen("\n\n", "\ncpus = 65\n\n", 1);
    is_refused(check(&written), "cpus must be 1 to 64 (got 65)");
    assert_eq!(check(&vm("cpus = { pin = [64] }")).0, 0, "a PC has more");
}

#[test]
fn files_of_a_ram_disk_have_less_than_4_gib() {
    let folder = Folder::new(&system("files = [\"file\"]"));
    folder.write("kernel", &bzimage());
    let check = |length: u64| {
        File::create(folder.path("file")).unwrap().set_len(length).unwrap();
        let output = folder.parador(&["system", "check", "system.toml"]).output().unwrap();
        (code(&output), errors(&output))
    };
    assert_eq!(check((4 << 30) - 1).0, 0);
    let (code, errors) = check(4 << 30);
    assert_eq!(code, 65, "{errors}");
    assert!(errors.starts_with("system.toml:3:10: error: file has 4 GiB or more"), "{errors}");
}

#[test]
fn the_sum_of_memory_may_exceed_64_bits() {
    let huge = ONE_VM.replace("64M", "17179869183G").replacen("\n\n", "\nmemory = \"1G\"\n\n", 1);
    let second = "[[vm]]\nname = \"b\"\nmemory = \"17179869183G\"\nkernel = \"kernel\"\n";
    let (code, errors) = check(&format!("{huge}{second}"));
    assert_eq!(code, 65, "{errors}");
    assert!(errors.contains("not enough memory (1 GiB)"), "{errors}");
    assert!(errors.contains(", Parador 0 MiB"), "{errors}");
}
