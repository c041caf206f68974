//! Devices that a container's processes may use, as a program for the guest's kernel.
//!
//! It is of type `BPF_PROG_TYPE_CGROUP_DEVICE` and runs at each `mknod` and whenever a device node
//! is opened. Rules count as with runc: later ones before earlier ones, for each kind of access by
//! itself, after them the devices that every container has; what no rule permits is denied.

use crate::refuse;
use hosted_command::failure::Failure;
use oci_spec::runtime::{Linux, LinuxDeviceCgroup, LinuxDeviceType};

/// Kinds of access (`BPF_DEVCG_ACC_*` of Linux).
const MKNOD: u32 = 1;
const READ: u32 = 2;
const WRITE: u32 = 4;
const ALL: u32 = MKNOD | READ | WRITE;
/// Kinds of devices (`BPF_DEVCG_DEV_*`).
const BLOCK: u32 = 1;
const CHARACTER: u32 = 2;
/// Most rules of a configuration.
const MAX_RULES: usize = 512;

/// Devices that every container has, as with runc: all may be made; character devices with these
/// numbers may be used.
const DEFAULT: [Rule; 12] = [
    Rule { kind: Some(BLOCK), major: None, minor: None, access: MKNOD, allow: true },
    Rule { kind: Some(CHARACTER), major: None, minor: None, access: MKNOD, allow: true },
    Rule::character(1, Some(3)),
    Rule::character(1, Some(5)),
    Rule::character(1, Some(7)),
    Rule::character(1, Some(8)),
    Rule::character(1, Some(9)),
    Rule::character(5, Some(0)),
    Rule::character(5, Some(1)),
    Rule::character(5, Some(2)),
    Rule::character(10, Some(200)),
    Rule::character(136, None),
];

/// Rule for devices; `None`: any kind or number.
#[derive(Clone, Copy, Debug)]
struct Rule {
    kind: Option<u32>,
    major: Option<u32>,
    minor: Option<u32>,
    access: u32,
    allow: bool,
}

/// Registers of the program: its result, its argument (`struct bpf_cgroup_dev_ctx`), kind of the
/// device, numbers, and the kinds of access that no rule has permitted yet.
const RESULT: u8 = 0;
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const MAJOR: u8 = 3;
const MINOR: u8 = 4;
const ACCESS: u8 = 5;

/// Operations of eBPF (Linux, `Documentation/bpf/instruction-set.rst`).
const LOAD_32: u8 = 0x61;
const MOVE: u8 = 0xbf;
const MOVE_NUMBER: u8 = 0xb7;
const AND_NUMBER: u8 = 0x57;
const SHIFT_RIGHT: u8 = 0x77;
const JUMP: u8 = 0x05;
const JUMP_IF_SET: u8 = 0x45;
const JUMP_NOT_EQUAL_32: u8 = 0x56;
const EXIT: u8 = 0x95;

/// Returns the program of a configuration; empty: its last rule permits all devices.
///
/// # Errors
/// There are too many rules, or one is malformed.
pub fn filter(linux: &Linux) -> Result<Vec<u64>, Failure> {
    let mut rules = stated(linux)?;
    if rules.last().is_some_and(|last| last.is_for_all() && last.allow) {
        return Ok(Vec::new());
    }
    rules.extend(DEFAULT);
    Ok(program(&rules))
}

/// Returns whether the last rule for all devices permits them, as for containers of
/// `podman run --privileged`. The first rule denies all for others.
///
/// # Errors
/// There are too many rules, or one is malformed.
pub fn are_all_permitted(linux: &Linux) -> Result<bool, Failure> {
    let rules = stated(linux)?;
    Ok(rules.iter().rfind(|rule| rule.is_for_all()).is_some_and(|rule| rule.allow))
}

/// Returns the rules of a configuration.
fn stated(linux: &Linux) -> Result<Vec<Rule>, Failure> {
    let stated = linux.resources().as_ref().and_then(|resources| resources.devices().as_deref());
    let stated = stated.unwrap_or_default();
    if stated.len() > MAX_RULES {
        let count = stated.len();
        let text = format!("linux.resources.devices: {count} rules; the most are {MAX_RULES}");
        return Err(refuse(text));
    }
    stated.iter().map(Rule::new).collect()
}

impl Rule {
    const fn character(major: u32, minor: Option<u32>) -> Self {
        Self { kind: Some(CHARACTER), major: Some(major), minor, access: ALL, allow: true }
    }

    fn new(rule: &LinuxDeviceCgroup) -> Result<Self, Failure> {
        let wrong = |text: String| refuse(format!("linux.resources.devices: {text}"));
        let kind = match rule.typ().unwrap_or_default() {
            LinuxDeviceType::A => None,
            LinuxDeviceType::B => Some(BLOCK),
            LinuxDeviceType::C | LinuxDeviceType::U => Some(CHARACTER),
            LinuxDeviceType::P => return Err(wrong("a FIFO is no device".to_owned())),
        };
        let number = |number: Option<i64>| match number {
            // As engines write it.
            None | Some(-1) => Ok(None),
            Some(number) => u32::try_from(number)
                .map(Some)
                .map_err(|_| wrong(format!("invalid device number {number}"))),
        };
        // The specification gives no meaning to a rule without access, and runc refuses it.
        let access = rule.access().as_deref().unwrap_or_default();
        if access.is_empty() {
            return Err(wrong("a rule has no access; r, w and m are known".to_owned()));
        }
        let access = access.chars().map(|kind| match kind {
            'r' => Ok(READ),
            'w' => Ok(WRITE),
            'm' => Ok(MKNOD),
            _ => Err(wrong(format!("invalid access {kind:?}; r, w and m are known"))),
        });
        let access = access.collect::<Result<Vec<_>, _>>()?.iter().fold(0, |all, one| all | one);
        let (major, minor) = (number(rule.major())?, number(rule.minor())?);
        Ok(Self { kind, major, minor, access, allow: rule.allow() })
    }

    /// Returns whether this is a rule for every access to all devices: no rule before it has any
    /// effect.
    fn is_for_all(&self) -> bool {
        self.access == ALL && [self.kind, self.major, self.minor] == [None; 3]
    }

    /// Appends the instructions of this rule.
    fn write(&self, program: &mut Vec<u64>) {
        let conditions = [(KIND, self.kind), (MAJOR, self.major), (MINOR, self.minor)];
        let conditions = conditions.into_iter().filter_map(|(from, value)| Some((from, value?)));
        let conditions: Vec<_> = conditions.collect();
        let body = match self.allow {
            true => [
                instruction(AND_NUMBER, ACCESS, 0, 0, !self.access),
                instruction(JUMP_NOT_EQUAL_32, ACCESS, 0, 2, 0),
                instruction(MOVE_NUMBER, RESULT, 0, 0, 1),
                instruction(EXIT, 0, 0, 0, 0),
            ]
            .to_vec(),
            false => [
                instruction(JUMP_IF_SET, ACCESS, 0, 1, self.access),
                instruction(JUMP, 0, 0, 2, 0),
                instruction(MOVE_NUMBER, RESULT, 0, 0, 0),
                instruction(EXIT, 0, 0, 0, 0),
            ]
            .to_vec(),
        };
        for (index, (register, value)) in conditions.iter().enumerate() {
            let skipped = conditions.len() - index - 1 + body.len();
            program.push(instruction(JUMP_NOT_EQUAL_32, *register, 0, skipped as u16, *value));
        }
        program.extend(body);
    }
}

/// Returns an instruction (`struct bpf_insn`): operation, registers, offset, number.
fn instruction(operation: u8, to: u8, from: u8, offset: u16, number: u32) -> u64 {
    let registers = u64::from(from << 4 | to);
    u64::from(operation) | registers << 8 | u64::from(offset) << 16 | u64::from(number) << 32
}

/// Returns the program of these rules.
fn program(rules: &[Rule]) -> Vec<u64> {
    let mut program = vec![
        // The kind of the device is in the lower half, the access in the upper one.
        instruction(LOAD_32, KIND, CONTEXT, 0, 0),
        instruction(MOVE, ACCESS, KIND, 0, 0),
        instruction(SHIFT_RIGHT, ACCESS, 0, 0, 16),
        instruction(AND_NUMBER, KIND, 0, 0, 0xffff),
        instruction(LOAD_32, MAJOR, CONTEXT, 4, 0),
        instruction(LOAD_32, MINOR, CONTEXT, 8, 0),
    ];
    for rule in rules.iter().rev() {
        rule.write(&mut program);
        if rule.is_for_all() {
            break;
        }
    }
    program.push(instruction(MOVE_NUMBER, RESULT, 0, 0, 0));
    program.push(instruction(EXIT, 0, 0, 0, 0));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether a program permits an access, as Linux would run it.
    fn permits(program: &[u64], kind: u32, numbers: [u32; 2], access: u32) -> bool {
        let bytes: Vec<u8> = program.iter().flat_map(|one| one.to_le_bytes()).collect();
        let context = [access << 16 | kind, numbers[0], numbers[1]];
        let mut context: Vec<u8> = context.iter().flat_map(|word| word.to_le_bytes()).collect();
        let machine = rbpf::EbpfVmRaw::new(Some(&bytes)).unwrap();
        machine.execute_program(&mut context).unwrap() == 1
    }

    fn linux(rules: &str) -> Linux {
        let text = format!("{{\"resources\": {{\"devices\": {rules}}}}}");
        serde_json::from_str(&text).unwrap()
    }

    fn filter_of(rules: &str) -> Result<Vec<u64>, Failure> {
        filter(&linux(rules))
    }

    /// Both decisions on the same rules.
    #[test]
    fn rules_for_all_devices() {
        let all = |rules: &str| {
            let linux = linux(rules);
            (are_all_permitted(&linux).unwrap(), filter(&linux).unwrap().is_empty())
        };
        let first = r#"{"allow": false, "access": "rwm"}"#;
        let of = |rule: &str| all(&format!("[{first},{rule}]"));
        assert_eq!(all("[]"), (false, false));
        assert_eq!(all(&format!("[{first}]")), (false, false));
        for rule in [
            r#"{"allow": true, "access": "rwm"}"#,
            r#"{"allow": true, "type": "a", "access": "mwr"}"#,
            r#"{"allow": true, "type": "a", "major": -1, "minor": -1, "access": "rwm"}"#,
        ] {
            assert_eq!(of(rule), (true, true), "{rule}");
            assert_eq!(of(&format!("{rule},{first}")), (false, false), "{rule}");
        }
        for rule in [
            r#"{"allow": true, "access": "rw"}"#,
            r#"{"allow": true, "type": "b", "access": "rwm"}"#,
            r#"{"allow": true, "major": 0, "access": "rwm"}"#,
            r#"{"allow": true, "minor": 0, "access": "rwm"}"#,
        ] {
            assert_eq!(of(rule), (false, false), "{rule}");
        }
    }

    #[test]
    fn rules_without_access_are_refused() {
        for rule in [r#"{"allow": true}"#, r#"{"allow": false, "access": ""}"#] {
            let linux = linux(&format!("[{rule}]"));
            let expected = "linux.resources.devices: a rule has no access; r, w and m are known";
            assert!(filter(&linux).unwrap_err().to_string().contains(expected));
            assert!(are_all_permitted(&linux).unwrap_err().to_string().contains(expected));
        }
    }

    #[test]
    fn devices_of_the_guest_are_denied_by_default() {
        for rules in ["[]", r#"[{"allow": false, "access": "rwm"}]"#] {
            let program = filter_of(rules).unwrap();
            let permits = |kind, numbers, access| permits(&program, kind, numbers, access);
            assert!(permits(CHARACTER, [1, 3], READ | WRITE));
            assert!(permits(CHARACTER, [136, 7], READ | WRITE));
            assert!(permits(BLOCK, [254, 0], MKNOD), "without access to it");
            for access in [READ, WRITE, READ | WRITE, MKNOD | READ] {
                assert!(!permits(BLOCK, [254, 0], access));
                assert!(!permits(CHARACTER, [1, 1], access), "memory");
                assert!(!permits(BLOCK, [1, 3], access));
            }
        }
    }

    #[test]
    fn later_rules_count_for_each_kind_of_access() {
        let program = filter_of(
            r#"[{"allow": true, "type": "c", "major": 10, "minor": -1, "access": "rw"},
                {"allow": false, "type": "c", "major": 10, "minor": 229, "access": "w"},
                {"allow": true, "type": "b", "major": 4294967295, "minor": 7, "access": "r"},
                {"allow": true, "type": "b", "major": 4294967295, "access": "w"},
                {"allow": false, "type": "c", "major": 1, "minor": 3, "access": "rwm"}]"#,
        )
        .unwrap();
        let permits = |kind, numbers, access| permits(&program, kind, numbers, access);
        assert!(permits(CHARACTER, [10, 229], READ));
        assert!(!permits(CHARACTER, [10, 229], WRITE));
        assert!(!permits(CHARACTER, [10, 229], READ | WRITE));
        assert!(permits(CHARACTER, [10, 230], READ | WRITE));
        assert!(permits(BLOCK, [u32::MAX, 7], READ | WRITE), "by two rules");
        assert!(!permits(BLOCK, [u32::MAX, 8], READ | WRITE));
        assert!(permits(CHARACTER, [1, 3], READ), "what every container has stays");
    }

    #[test]
    fn a_device_may_be_denied_to_a_privileged_container() {
        let all = r#"{"allow": true, "access": "rwm"}"#;
        assert!(filter_of(&format!("[{all}]")).unwrap().is_empty());
        let disk = r#"{"allow": false, "type": "b", "major": 254, "access": "rwm"}"#;
        let program = filter_of(&format!("[{all},{disk}]")).unwrap();
        assert!(!permits(&program, BLOCK, [254, 0], READ));
        assert!(permits(&program, BLOCK, [7, 0], READ | WRITE));
    }

    #[test]
    fn malformed_rules_are_refused() {
        let many = format!("[{}]", vec![r#"{"allow": true}"#; MAX_RULES + 1].join(","));
        let text = |rules: &str| filter_of(rules).unwrap_err().to_string();
        assert!(text(&many).contains("513 rules; the most are 512"));
        assert!(text(r#"[{"allow": true, "access": "rx"}]"#).contains("invalid access 'x'"));
        assert!(
            text(r#"[{"allow": true, "major": -2, "access": "r"}]"#)
                .contains("invalid device number -2")
        );
        assert!(text(r#"[{"allow": true, "type": "p"}]"#).contains("a FIFO is no device"));
        let most = format!(
            "[{}]",
            vec![r#"{"allow": true, "major": 9, "access": "r"}"#; MAX_RULES].join(",")
        );
        assert!(permits(&filter_of(&most).unwrap(), BLOCK, [9, 9], READ));
    }

    #[test]
    fn rules_before_one_for_all_devices_are_left_out() {
        let short = filter_of(r#"[{"allow": false, "access": "rwm"}]"#).unwrap();
        let rules = format!(
            "[{},{}]",
            vec![r#"{"allow": true, "major": 9, "access": "r"}"#; 100].join(","),
            r#"{"allow": false, "type": "a", "access": "rwm"}"#
        );
        assert_eq!(filter_of(&rules).unwrap(), short);
    }
}
