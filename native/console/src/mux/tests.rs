//! Scripts of client output and user input, compared with the resulting line.

use super::*;

/// Clients of the scripts.
const STEWARD: usize = 5;
const LINUX: usize = 20;
const MICRO: usize = 21;

struct Rig(Box<Mux>);

impl Rig {
    /// Creates a multiplexer with three clients; the steward is selected.
    fn new() -> Self {
        let mut rig = Self::single();
        rig.0.multiplex();
        rig.0.open(STEWARD, "steward");
        rig.0.open(LINUX, "linux");
        rig.0.open(MICRO, "micro");
        rig.line();
        rig
    }

    fn single() -> Self {
        Self(Box::new(Mux::new()))
    }

    /// Returns the output on the line since the last call.
    fn line(&mut self) -> std::string::String {
        let bytes: Vec<u8> = core::iter::from_fn(|| self.0.next()).collect();
        std::string::String::from_utf8(bytes).unwrap()
    }

    fn write(&mut self, client: usize, text: &str) -> usize {
        self.0.write(client, text.as_bytes())
    }

    fn keys(&mut self, keys: &str) {
        keys.bytes().for_each(|key| self.0.key(key));
    }

    fn read(&mut self, client: usize) -> std::string::String {
        let mut bytes = [0; 100];
        let length = self.0.read(client, &mut bytes);
        std::string::String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    fn wakes(&mut self) -> Vec<usize> {
        self.0.take_wakes().collect()
    }
}

#[test]
fn one_client_has_the_line_for_itself() {
    let mut rig = Rig::single();
    rig.0.open(LINUX, "linux");
    assert_eq!(rig.write(LINUX, "a\r\n\x1b[2J"), 7);
    assert_eq!(rig.line(), "a\r\n\x1b[2J");
    rig.keys("x\x1d2");
    assert_eq!(rig.wakes(), [LINUX]);
    assert_eq!(rig.read(LINUX), "x\x1d2", "the escape key is a key like any other");
    assert_eq!(rig.write(LINUX, &"x".repeat(OUTPUT + 1)), OUTPUT);
    assert_eq!(rig.wakes(), []);
    assert_eq!(rig.line().len(), OUTPUT);
    assert_eq!(rig.wakes(), [LINUX], "there is room");
    assert_eq!(rig.0.input_room(), INPUT);
    (0..INPUT).for_each(|_| rig.0.key(b'k'));
    assert_eq!(rig.0.input_room(), 0, "the port keeps what comes then");
}

#[test]
fn the_selected_client_is_shown_and_typed_to() {
    let mut rig = Rig::new();
    rig.write(LINUX, "hidden\r\n");
    rig.write(STEWARD, "\x1b[1mraw\r\n");
    assert_eq!(rig.line(), "\x1b[1mraw\r\n");
    rig.keys("list\r");
    assert_eq!(rig.wakes(), [STEWARD], "told once");
    assert_eq!(rig.read(STEWARD), "list\r");
    assert_eq!(rig.read(LINUX), "");
}

#[test]
fn a_switch_shows_the_last_lines() {
    let mut rig = Rig::new();
    for line in 0..30 {
        rig.write(LINUX, &format!("line {line}\r\n"));
    }
    rig.write(LINUX, "# ");
    rig.keys("\x1d2");
    let shown = rig.line();
    assert!(shown.starts_with("\x1b[m\r\n[parador] linux (2); Ctrl-] ? for help\r\nline 10\r\n"));
    assert!(shown.ends_with("line 29\r\n# "), "{shown:?}");
    rig.keys("ls\r");
    assert_eq!((rig.read(LINUX).as_str(), rig.read(STEWARD).as_str()), ("ls\r", ""));
    rig.keys("\x1ds");
    assert!(rig.line().contains("\r\nline 0\r\nline 1\r\n"), "all that is kept");
}

#[test]
fn ways_to_switch() {
    let mut rig = Rig::new();
    for (keys, selected) in [
        ("\x1dn", "linux (2)"),
        ("\x1dn", "micro (3)"),
        ("\x1dn", "log (0)"),
        ("\x1dp", "micro (3)"),
        ("\x1d1", "steward (1)"),
        ("\x1d:micro\r", "micro (3)"),
        ("\x1d:st\r", "steward (1)"),
        ("\x1d:lx\x7finux\r", "linux (2)"),
        ("\x1d:0\r", "log (0)"),
    ] {
        rig.keys(keys);
        let line = rig.line();
        assert!(line.contains(&format!("[parador] {selected};")), "{keys:?}: {line:?}");
    }
    for (keys, answer) in [
        ("\x1d9", "no client has number 9"),
        ("\x1d:x\r", "no client matches \"x\""),
        ("\x1d:l\r", "several clients match \"l\""),
        ("\x1d:\r", "no client matches \"\""),
        ("\x1d:li\x03", "selection cancelled"),
        ("\x1dz", "unknown command"),
    ] {
        rig.keys(keys);
        let line = rig.line();
        assert!(line.contains(answer), "{keys:?}: {line:?}");
    }
    assert_eq!(rig.0.selected, LOG_SESSION);
}

#[test]
fn clients_are_numbered_before_they_come() {
    let mut rig = Rig::single();
    rig.0.multiplex();
    for (client, name) in [(STEWARD, "steward"), (LINUX, "linux"), (MICRO, "micro")] {
        rig.0.announce(client, name);
    }
    assert!(rig.line().contains("steward (1)"), "the first one is selected");
    rig.keys("\x1d3");
    assert!(rig.line().contains("micro (3)"));
    rig.0.open(MICRO, "micro");
    rig.0.open(LINUX, "linux");
    rig.0.announce(LINUX, "linux");
    assert_eq!(rig.line(), "");
    rig.write(MICRO, "hello");
    assert_eq!(rig.line(), "hello");
    // A client that ends before it has opened its session.
    rig.0.close(STEWARD);
    rig.keys("\x1d1");
    assert!(rig.line().contains("steward (1, ended)"));
}

#[test]
fn the_escape_key_can_be_typed() {
    let mut rig = Rig::new();
    rig.keys("a\x1d\x1db");
    assert_eq!(rig.read(STEWARD), "a\x1db");
}

#[test]
fn lines_of_all_have_prefixes() {
    let mut rig = Rig::new();
    rig.keys("\x1da");
    rig.line();
    rig.write(STEWARD, "> li");
    rig.write(LINUX, "half ");
    rig.write(MICRO, "hello\r\n");
    rig.write(STEWARD, "st\r\n");
    rig.write(LINUX, "a line\r\nnext");
    rig.0.log(b"vm micro ended\n");
    assert_eq!(
        rig.line(),
        "[steward] > li\r\x1b[K[micro] hello\r\n[steward] > list\r\n[linux] half a line\r\n[log] vm micro ended\r\n"
    );
    rig.keys("\x1da");
    rig.line();
    rig.write(LINUX, "hidden again");
    assert_eq!(rig.line(), "");
}

#[test]
fn no_client_forges_a_prefix() {
    let attempts = [
        "\r[steward] x\r\n",
        "\x1b[1G[steward] x\r\n",
        "\x1b[2K\x1b[0E[steward] x\r\n",
        "a\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08[steward] x\r\n",
        "\x0b\r[steward] x\n",
        "\n[steward] x\n",
        "\x1bc[steward] x\n",
        "\u{85}[steward] x\n",
    ];
    let long = format!("{}[steward] x\n", " ".repeat(80 - "[linux] ".len()));
    for attempt in attempts.into_iter().chain([long.as_str()]) {
        for selected in ["\x1d1", "\x1d2"] {
            let mut rig = Rig::new();
            rig.keys("\x1da");
            rig.keys(selected);
            rig.line();
            rig.write(LINUX, attempt);
            // As a terminal of 80 columns shows it.
            let shown = rig.line();
            let lines = shown.split("\r\n").flat_map(|line| line.split("\r\x1b[K"));
            for line in lines.filter(|line| !line.is_empty()) {
                assert!(line.len() < 80, "{attempt:?} wraps: {line:?}");
                let line = line.trim_end_matches('\x08');
                assert!(line.starts_with("[linux] "), "{attempt:?} shows {line:?}");
                assert!(line.bytes().all(|byte| byte >= b' ' || byte == 0x08), "{line:?}");
            }
        }
    }
}

#[test]
fn unselected_clients_never_wait() {
    let mut rig = Rig::new();
    let flood = "flood\r\n".repeat(10_000);
    assert_eq!(rig.write(LINUX, &flood), flood.len(), "only kept");
    assert_eq!(rig.line(), "");
    rig.keys("\x1da");
    assert_eq!(rig.write(LINUX, &flood), flood.len(), "dropped when there is no room");
    rig.line();
    rig.write(LINUX, "after\r\n");
    let line = rig.line();
    assert!(line.contains("lines dropped)\r\n[linux] after\r\n"), "{line}");
    // The selected client waits for the line, and is signalled.
    rig.keys("\x1da");
    rig.line();
    let taken = rig.write(STEWARD, &flood);
    assert!(taken < flood.len() && taken > OUTPUT / 2);
    rig.wakes();
    rig.line();
    assert_eq!(rig.wakes(), [STEWARD]);
}

/// In the view of all clients, `floods` write as much as they can, and the selected steward too if
/// `steward_writes`, while the line accepts 2,000,000 bytes, one FIFO at a time; the micro-guest
/// writes a line now and then. Returns the output on the line, and the number of signals of room to
/// the steward.
fn flooded(floods: &[usize], steward_writes: bool) -> (std::string::String, usize) {
    const FIFO: usize = 16;
    const LINE: usize = 2_000_000;
    let mut rig = Rig::new();
    for &client in floods.iter().filter(|&&client| client != LINUX) {
        rig.0.open(client, "floods");
    }
    rig.keys("\x1da");
    rig.line();
    let (mut sent, mut wakes, mut may_write, mut quiet) = (Vec::new(), 0, steward_writes, 0);
    for round in 0..LINE / FIFO {
        for &client in floods {
            let line = "a line of one that writes and writes\r\n";
            assert_eq!(rig.write(client, line), line.len(), "an unselected client never waits");
        }
        if round % 2000 == 0 {
            quiet += 1;
            rig.write(MICRO, &format!("quiet {quiet}\r\n"));
        }
        while may_write {
            let line = "a line of the selected one\r\n";
            may_write = rig.write(STEWARD, line) == line.len();
        }
        sent.extend(core::iter::from_fn(|| rig.0.next()).take(FIFO));
        if rig.wakes().contains(&STEWARD) {
            (wakes, may_write) = (wakes + 1, steward_writes);
        }
    }
    let sent = std::string::String::from_utf8(sent).unwrap();
    for number in 1..quiet {
        let there = sent.contains(&format!("[micro] quiet {number}\r\n"));
        assert!(there, "line {number} of {quiet} of a client that does not flood is missing");
    }
    (sent, wakes)
}

#[test]
fn floods_do_not_starve_the_selected_client() {
    let (line, wakes) = flooded(&[LINUX], true);
    let own = line.matches("[steward] ").count() as f64 / line.matches("\r\n").count() as f64;
    assert!(
        wakes > 100 && (0.4..0.9).contains(&own),
        "signalled {wakes} times, {own} of all lines"
    );
    let several: Vec<usize> = (LINUX + 10..LINUX + 16).collect();
    let (line, wakes) = flooded(&several, true);
    let own = line.matches("[steward] ").count() as f64 / line.matches("\r\n").count() as f64;
    assert!(
        wakes > 100 && (0.15..0.9).contains(&own),
        "signalled {wakes} times, {own} of all lines"
    );
}

#[test]
fn the_selected_client_does_not_hide_others() {
    let (line, _) = flooded(&[], true);
    assert!(!line.contains("lines dropped"));
    // One client that floods does not hide others either while these write little.
    let (line, _) = flooded(&[LINUX], false);
    assert!(line.contains("[linux] (") && !line.contains("[micro] ("));
}

#[test]
fn a_waiting_client_is_signalled_in_every_view() {
    let mut rig = Rig::new();
    for view in 0..4 {
        while rig.write(STEWARD, "a line\r\n") == 8 {}
        rig.wakes();
        // The client waits; then the view changes, and the line continues.
        if view % 2 == 1 {
            rig.keys("\x1da");
        }
        rig.line();
        assert_eq!(rig.wakes(), [STEWARD], "round {view}");
    }
}

#[test]
fn a_flood_does_not_keep_the_user_from_switching() {
    let mut rig = Rig::new();
    rig.keys("\x1d2");
    rig.write(LINUX, &"x\r\n".repeat(10_000));
    (0..3 * INPUT).for_each(|_| rig.0.key(b'k'));
    assert!(rig.0.input_room() > 0, "a client that does not read");
    rig.keys("\x1d1");
    assert!(rig.line().contains("steward (1)"), "at once: what waited is dropped");
    assert_eq!(rig.wakes(), [LINUX], "which has room now");
}

#[test]
fn ends_and_returns() {
    let mut rig = Rig::new();
    rig.keys("\x1d2");
    rig.write(LINUX, "last words\r\n");
    rig.line();
    rig.0.close(LINUX);
    assert!(rig.line().contains("linux has ended"));
    rig.keys("dead\r");
    assert_eq!(rig.wakes(), []);
    rig.keys("\x1d3\x1d2");
    assert!(rig.line().contains("linux (2, ended); Ctrl-] ? for help\r\nlast words"));
    rig.0.open(LINUX, "linux");
    assert!(rig.line().contains("linux is connected again"));
    assert_eq!(rig.read(LINUX), "");
    rig.keys("\x1d?");
    let list = rig.line();
    assert!(list.contains("[parador]   0 log") && list.contains("[parador] > 2 linux"), "{list}");
    assert!(list.contains("Ctrl-] n, p"));
    // The session goes to another client: it does not get the history of the former one.
    rig.0.close(LINUX);
    rig.0.open(LINUX, "other");
    rig.keys("\x1d1\x1d2");
    assert!(!rig.line().contains("last words"));
}

#[test]
fn any_sequence_keeps_the_invariants() {
    let mut rig = Rig::new();
    let mut random = 1_u64;
    for _ in 0..200_000 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (choice, byte) = (random >> 60, (random >> 40) as u8);
        let client = [STEWARD, LINUX, MICRO][(random >> 32) as usize % 3];
        match choice {
            0..8 => assert!(rig.0.write(client, &[byte; 3]) <= 3),
            8..11 => rig.0.key(byte),
            11 => rig.keys("\x1d"),
            12 => rig.0.close(client),
            13 => rig.0.open(client, "again"),
            14 => assert!(rig.read(client).len() <= 300),
            _ => while rig.0.next().is_some() {},
        }
        assert!(rig.0.input_room() > 0);
    }
}

#[test]
fn early_keys_go_to_the_first_client() {
    // The server has just restarted: root names the clients, and they open their sessions later.
    let mut rig = Rig::single();
    rig.0.multiplex();
    rig.keys("li");
    rig.0.announce(STEWARD, "steward");
    rig.0.announce(LINUX, "linux");
    rig.keys("st\r\x1d2ls\r");
    rig.0.open(STEWARD, "steward");
    rig.0.open(LINUX, "linux");
    assert!(rig.wakes().ends_with(&[STEWARD, LINUX]));
    assert_eq!((&*rig.read(STEWARD), &*rig.read(LINUX)), ("list\r", "ls\r"));
    // As many as fit.
    rig.0.close(LINUX);
    rig.keys("dropped");
    rig.0.announce(LINUX, "linux");
    (0..2 * INPUT).for_each(|_| rig.0.key(b'k'));
    rig.0.open(LINUX, "linux");
    let read = core::iter::from_fn(|| Some(rig.read(LINUX).len()).filter(|&length| length > 0));
    assert_eq!(read.sum::<usize>(), INPUT, "not those that came when it had ended");
    // Keys for a previous client of the session do not go to the next one.
    rig.keys("old");
    rig.0.open(LINUX, "linux");
    assert_eq!(rig.read(LINUX), "");
}

#[test]
fn keys_wait_for_the_only_client() {
    let mut rig = Rig::single();
    rig.keys("early");
    rig.0.open(LINUX, "linux");
    rig.keys("late");
    assert_eq!((rig.wakes(), &*rig.read(LINUX)), (vec![LINUX], "earlylate"));
}
