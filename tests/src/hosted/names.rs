//! VMs with names: `parador ps`, `top`, `metrics`, `ctl NAME`.

use super::{LIMIT, Rig, SLOW, end};
use crate::system::parador;
use anyhow::{Context, Result, ensure};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Variable that names the runtime folder.
const RUNTIME: &str = "XDG_RUNTIME_DIR";

/// VMs of one user in a runtime folder of their own.
struct Fleet<'a>(&'a Rig);

impl Fleet<'_> {
    fn parador(&self, words: &[&str]) -> Command {
        let mut command = parador(self.0.folder());
        command.env(RUNTIME, self.0.folder()).args(words);
        command
    }

    fn start(&self, name: &str) -> Result<Child> {
        let mut run = self.0.bare(LIMIT);
        run.env(RUNTIME, self.0.folder()).args(["-i", "busybox", "--name", name]);
        let run = run.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        run.spawn().context("cannot start parador")
    }

    /// Runs a command; returns its output.
    fn told(&self, words: &[&str], code: i32) -> Result<String> {
        let output = self.parador(words).output().context("cannot start parador")?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        ensure!(output.status.code() == Some(code), "{words:?}: {}\n{text}", output.status);
        Ok(text)
    }

    /// Waits until the output of a command has the first text, and checks that it has not the
    /// second one.
    fn until(&self, words: &[&str], text: &str, never: &str) -> Result<String> {
        let deadline = Instant::now() + SLOW;
        loop {
            let found = self.told(words, 0)?;
            if found.contains(text) && !found.contains(never) {
                return Ok(found);
            }
            ensure!(Instant::now() < deadline, "{words:?}, not {text}:\n{found}");
            sleep(Duration::from_millis(50));
        }
    }
}

/// Two VMs are listed, controlled and measured by their names; a killed one disappears, and its
/// name is free.
pub fn names() -> Result<()> {
    let rig = Rig::new()?;
    let fleet = Fleet(&rig);
    let (mut web, mut db) = (fleet.start("web")?, fleet.start("db")?);
    fleet.until(&["ps", "--json"], "\"name\": \"web\"", "starting")?;
    let list = fleet.until(&["ps", "--json"], "\"name\": \"db\"", "starting")?;
    for part in [
        "\"name\": \"web\"".to_owned(),
        format!("\"pid\": {}", web.id()),
        format!("\"pid\": {}", db.id()),
        "\"backend\": \"process\"".to_owned(),
        "\"memory_bytes\": 1073741824".to_owned(),
    ] {
        ensure!(list.contains(&part), "{part}:\n{list}");
    }
    ensure!(fleet.told(&["ctl", "db", "pause"], 0)?.contains("paused"), "it does not pause");
    let table = fleet.told(&["top", "--once"], 0)?;
    ensure!(table.lines().any(|line| line.starts_with("db") && line.contains("paused")), "{table}");
    served(&fleet)?;
    refused(&fleet)?;
    // `setpriv` has become `parador`.
    web.kill().and_then(|()| web.wait()).context("cannot kill parador")?;
    let list = fleet.told(&["ps"], 0)?;
    ensure!(list.contains("db") && !list.contains("web"), "{list}");
    let mut web = fleet.start("web")?;
    fleet.until(&["ps"], "web", "nothing")?;
    for (name, child) in [("web", &mut web), ("db", &mut db)] {
        fleet.told(&["ctl", name, "shutdown", "--force"], 0)?;
        ensure!(child.wait().context("cannot wait")?.success(), "{name} fails");
    }
    ensure!(!fleet.told(&["ps"], 0)?.contains("db"), "it is listed after its end");
    Ok(())
}

/// The metrics of both are served over TCP.
fn served(fleet: &Fleet<'_>) -> Result<()> {
    let mut command = fleet.parador(&["metrics", "--listen", "127.0.0.1:0"]);
    let mut server = command.stderr(Stdio::piped()).spawn().context("cannot start parador")?;
    let mut line = String::new();
    let errors = server.stderr.take().context("no messages")?;
    BufReader::new(errors).read_line(&mut line).context("no message")?;
    let ask = || -> Result<String> {
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        let mut stream = TcpStream::connect(address.context("no address")?)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask();
    server.kill().and_then(|()| server.wait()).context("cannot end the server")?;
    let answer = answer.with_context(|| line.clone())?;
    for part in [
        "HTTP/1.1 200 OK",
        "parador_state{state=\"running\",vm=\"web\"} 1",
        "parador_state{state=\"paused\",vm=\"db\"} 1",
        "parador_memory_bytes{vm=\"db\"} 1073741824",
    ] {
        ensure!(answer.contains(part), "{part}:\n{answer}");
    }
    ensure!(answer.matches("# TYPE parador_state gauge").count() == 1, "{answer}");
    Ok(())
}

/// Names that are taken or malformed, and runtime folders that others may use.
fn refused(fleet: &Fleet<'_>) -> Result<()> {
    let again = |name: &str| {
        let mut run = fleet.0.bare(LIMIT);
        end(run.env(RUNTIME, fleet.0.folder()).args(["-i", "busybox", "--name", name]), "")
    };
    again("web")?.has(64, &["a VM with the name web is running (process"])?;
    for name in ["../web", "status", ""] {
        again(name)?.has(64, &["--name"])?;
    }
    let said = fleet.told(&["ctl", "other", "status"], 66)?;
    ensure!(said.contains("no VM has the name other"), "{said}");
    let open = fleet.0.path("open");
    let folder = open.join("parador");
    fs::create_dir_all(&folder).context("cannot make a folder")?;
    // Whatever the umask is.
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).context("cannot change it")?;
    for words in [&["ps"][..], &["metrics"], &["ctl", "web", "status"]] {
        let output = fleet.parador(words).env(RUNTIME, &open).output().context("no parador")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(77) && said.contains("mode 755"), "{words:?}: {said}");
    }
    Ok(())
}
