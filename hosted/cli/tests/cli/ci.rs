//! Files for CI services: the action for GitHub's runners, and the job for other services.

use crate::support::{Folder, code, errors};
use std::process::{Command, Output};

const ACTION: &str = include_str!("../../../../action.yml");
const JOB: &str = include_str!("../../../../examples/ci.sh");

/// A folder whose `tools` are stand-ins for `parador`, apt and sudo.
fn folder(parador: &str, apt: &str) -> Folder {
    let folder = Folder::new("");
    std::fs::create_dir(folder.path("tools")).unwrap();
    folder.script("tools/parador", parador);
    folder.script("tools/apt-get", apt);
    folder.script("tools/sudo", "exec \"$@\"");
    folder
}

/// Runs a script, one for bash as GitHub's runners do.
fn run(folder: &Folder, shell: &str, script: &str, arguments: &[&str]) -> Output {
    folder.write("script", script.as_bytes());
    let mut command = Command::new(shell);
    if shell == "bash" {
        command.args(["--noprofile", "--norc", "-eo", "pipefail"]);
    }
    let path = format!("{}:{}", folder.path("tools").display(), std::env::var("PATH").unwrap());
    command.arg("script").args(arguments).current_dir(folder.path("")).env("PATH", path);
    command.env("GITHUB_OUTPUT", folder.path("output")).output().unwrap()
}

/// Returns the script of the step of the action with this name.
fn step(name: &str) -> String {
    let step = ACTION.split(&format!("- name: {name}\n")).nth(1).unwrap();
    let script = step.split("run: |\n").nth(1).unwrap().split("\n    - name: ").next().unwrap();
    script.lines().map(|line| format!("{}\n", line.strip_prefix("        ").unwrap())).collect()
}

#[test]
fn the_action_reports_that_parador_does_not_work() {
    let report = "echo '{'; echo '  \"backend\": \"kvm\"'; echo '}'; exit";
    for (parador, expected) in [("0", 0), ("69", 0), ("70", 70)] {
        let folder = folder(&format!("{report} {parador}"), "exit 1");
        let output = run(&folder, "bash", &step("doctor"), &[]);
        assert_eq!(code(&output), expected, "{}", errors(&output));
        if expected == 0 {
            let text = String::from_utf8(folder.read("output")).unwrap();
            assert!(text.ends_with("\nbackend=kvm\n"), "{text}");
            assert_eq!(output.stdout, b"{\n  \"backend\": \"kvm\"\n}\n");
        }
    }
}

#[test]
fn the_code_of_a_job_tells_its_command_from_parador() {
    let parador = "case $1 in doctor) exit $(cat doctor) ;; exec) exit 7 ;; esac";
    for (apt, doctor, expected) in [("0", "0", 7), ("100", "0", 125), ("0", "69", 125)] {
        let folder = folder(parador, &format!("exit {apt}"));
        folder.write("doctor", doctor.as_bytes());
        let output = run(&folder, "sh", JOB, &["parador.deb", "true"]);
        assert_eq!(code(&output), expected, "{}", errors(&output));
    }
    let folder = folder(parador, "exit 0");
    for wrong in [&["missing/parador.deb", "true"][..], &[]] {
        assert_eq!(code(&run(&folder, "sh", JOB, wrong)), 125, "{wrong:?}");
    }
}

#[test]
fn a_job_needs_no_package_lists() {
    let apt = "case $1 in update) >lists ;; install) [ -e lists ] ;; esac";
    let folder = folder("[ $1 = doctor ] || exit 7", apt);
    let output = run(&folder, "sh", JOB, &["parador.deb", "true"]);
    assert_eq!(code(&output), 7, "{}", errors(&output));
}
