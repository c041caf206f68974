//! A program on a terminal of its own, as a user starts it.

use crate::transcript::Transcript;
use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::Write;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Size of the terminal: that of a VT100.
const SIZE: Winsize = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
/// Type of the terminal where the caller has none.
const KIND: (&str, &str) = ("TERM", "vt100");
/// Time that a program has for its clean-up after its terminal has hung up.
const GRACE: Duration = Duration::from_secs(5);
/// Time after the end of a program in which the last of its output arrives.
const LAST_OUTPUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(50);

/// A program that leads a session on a pseudo-terminal.
///
/// The session ends with this value: all its processes get SIGHUP, then SIGKILL. It also ends with
/// the process that holds the value: Linux hangs up a terminal whose other end is closed.
pub struct Terminal {
    child: Child,
    session: Pid,
    keyboard: File,
    /// Everything that the session's processes have written.
    pub screen: Transcript,
}

impl Terminal {
    /// Starts `command`, whose standard streams and process group are replaced.
    pub fn start(command: &Command) -> Result<Self> {
        let user = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .context("cannot open a pseudo-terminal")?;
        grantpt(&user).and_then(|()| unlockpt(&user)).context("cannot open a terminal's end")?;
        let name = ptsname(&user, Vec::new()).context("a pseudo-terminal has no name")?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let program = rustix::fs::open(name, flags, Mode::empty()).map(File::from);
        let program = program.context("cannot open a terminal")?;
        tcsetwinsize(&program, SIZE).context("cannot set a terminal's size")?;
        // Making a session here would take unsafe code; `setsid` is in every Debian, and makes way
        // for the program.
        let mut leader = Command::new("setsid");
        leader.arg("--ctty").arg(command.get_program()).args(command.get_args());
        if let Some(folder) = command.get_current_dir() {
            leader.current_dir(folder);
        }
        if std::env::var_os(KIND.0).is_none() {
            leader.env(KIND.0, KIND.1);
        }
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => leader.env(name, value),
                None => leader.env_remove(name),
            };
        }
        let copies = program.try_clone().and_then(|first| Ok((first, program.try_clone()?)));
        let (input, output) = copies.context("cannot copy a terminal's descriptor")?;
        leader.stdin(input).stdout(output).stderr(program);
        let child = leader.spawn().with_context(|| format!("cannot start {leader:?}"))?;
        let session = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let user = File::from(user);
        let screen = user.try_clone().context("cannot copy a terminal's descriptor")?;
        Ok(Self {
            child,
            session: session.context("a process has no number")?,
            keyboard: user,
            screen: Transcript::follow_terminal("terminal", screen),
        })
    }

    /// Presses keys.
    pub fn type_text(&mut self, text: &str) -> Result<()> {
        self.keyboard.write_all(text.as_bytes()).context("cannot type on the terminal")
    }

    /// Waits for the end of the program and returns its exit code.
    pub fn wait(&mut self, deadline: Instant) -> Result<i32> {
        loop {
            if let Some(status) = self.child.try_wait().context("cannot wait for the program")? {
                self.screen.finish(LAST_OUTPUT);
                return status.code().with_context(|| format!("the program was ended: {status}"));
            }
            if Instant::now() >= deadline {
                bail!("the program did not end in time");
            }
            sleep(PAUSE);
        }
    }
}

impl Terminal {
    /// Sends a signal to all processes of the session. Returns whether they are gone in time.
    fn end(&mut self, signal: Signal) -> bool {
        let deadline = Instant::now() + GRACE;
        // There may be none any more.
        let _ = kill_process_group(self.session, signal);
        while Instant::now() < deadline {
            // An unreaped group leader still counts as a process.
            let _ = self.child.try_wait();
            if test_kill_process_group(self.session) == Err(Errno::SRCH) {
                return true;
            }
            sleep(PAUSE);
        }
        false
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.end(Signal::HUP) || self.end(Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Terminal {
        let mut command = Command::new("sh");
        Terminal::start(command.args(["-c", script]).env("COLOUR", "red")).unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn a_program_has_a_terminal() {
        let mut terminal =
            shell("test -t 0 && test -t 1 && stty size </dev/tty; read x; echo $x$COLOUR; exit 7");
        terminal.screen.expect("24 80", soon()).unwrap();
        terminal.type_text("light\r").unwrap();
        terminal.screen.expect("lightred", soon()).unwrap();
        assert_eq!(terminal.wait(soon()).unwrap(), 7);
    }

    #[test]
    fn its_processes_end_with_it() {
        // One that takes notice of SIGHUP, and one that does not.
        let deaf = "trap '' HUP; echo \\$\\$; exec sleep 1000";
        let mut terminal = shell(&format!("sleep 1000 & echo $!; sh -c \"{deaf}\""));
        for _ in 0..2 {
            terminal.screen.expect("\n", soon()).unwrap();
        }
        let text = terminal.screen.text();
        let mut numbers = text.split_whitespace().filter_map(|word| word.parse::<i32>().ok());
        let processes = [numbers.next().unwrap(), numbers.next().unwrap()];
        drop(terminal);
        for process in processes {
            // A zombie whose new parent has not asked for it yet is gone, too.
            let status = std::fs::read_to_string(format!("/proc/{process}/stat"));
            assert!(status.is_err() || status.unwrap().contains(") Z "), "{process} is there");
        }
    }
}
