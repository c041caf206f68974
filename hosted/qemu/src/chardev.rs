//! Character devices of QEMU (`-chardev`, `-serial`) as targets of console lines.

use crate::params::Params;
use crate::refuse;
use hosted_command::failure::Failure;
use hosted_monitor::config::console::Target;

/// Parameters without effect.
const IGNORED: &[&str] = &["signal", "wait", "reconnect", "telnet", "cols", "rows"];

/// Host end of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chardev {
    /// Target of the line.
    pub target: Target,
    /// QEMU's monitor shares it (`mux=on`).
    pub is_shared: bool,
}

impl Chardev {
    /// Parses the value of `-chardev`; returns its ID, too.
    ///
    /// # Errors
    /// A wrong parameter: code 64. A kind that is not supported: 69.
    pub fn parse(text: &str) -> Result<(String, Self), Failure> {
        let mut params = Params::parse("-chardev", Some("backend"), text)?;
        let kind = params.require("backend")?;
        let id = params.require("id")?;
        let is_shared = params.take_switch("mux")?;
        let target = match kind.as_str() {
            "null" => Target::Null,
            "stdio" => Target::Stdio,
            "pty" => Target::Pty,
            "file" => file(&mut params)?,
            "socket" => socket(&mut params)?,
            other => {
                let known = "null, stdio, pty, file and socket";
                return Err(params.unsupported(&format!("`{other}` is none of {known}")));
            }
        };
        params.finish(IGNORED)?;
        Ok((id, Self { target, is_shared }))
    }

    /// Parses the value of `-serial` that names no `-chardev`.
    ///
    /// # Errors
    /// See [`Self::parse`].
    pub fn serial(text: &str) -> Result<Self, Failure> {
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        let target = match (kind, rest) {
            ("stdio", "") => Target::Stdio,
            ("mon", "stdio") => return Ok(Self { target: Target::Stdio, is_shared: true }),
            ("null" | "none", "") => Target::Null,
            ("pty", "") => Target::Pty,
            ("file", path) if !path.is_empty() => Target::File(path.into()),
            ("unix", rest) if !rest.is_empty() => {
                let mut params = Params::parse("-serial", Some("path"), rest)?;
                let target = socket(&mut params)?;
                params.finish(IGNORED)?;
                target
            }
            _ => {
                let params = Params::parse("-serial", Some("backend"), text)?;
                let known = "stdio, null, none, pty, file:PATH, unix:PATH and chardev:ID";
                return Err(params.unsupported(&format!("it is none of {known}")));
            }
        };
        Ok(Self { target, is_shared: false })
    }
}

fn file(params: &mut Params) -> Result<Target, Failure> {
    if params.take_switch("append")? {
        return Err(params.unsupported("output cannot be appended to a file"));
    }
    Ok(Target::File(params.require("path")?.into()))
}

/// Takes the parameters of a listening Unix socket.
fn socket(params: &mut Params) -> Result<Target, Failure> {
    if params.take("host").or(params.take("port")).or(params.take("fd")).is_some() {
        return Err(params.unsupported("only Unix sockets are supported (path=SOCKET)"));
    }
    let path = params.require("path")?;
    if !params.take_switch("server")? {
        return Err(params.unsupported("VMs only listen: add server=on,wait=off"));
    }
    Ok(Target::Unix(path.into()))
}

/// Character devices by ID.
#[derive(Debug, Default)]
pub struct Chardevs {
    all: Vec<(String, Chardev, bool)>,
}

impl Chardevs {
    /// Adds the value of a `-chardev`.
    ///
    /// # Errors
    /// See [`Chardev::parse`]; an ID is used twice: code 64.
    pub fn add(&mut self, text: &str) -> Result<(), Failure> {
        let (id, device) = Chardev::parse(text)?;
        if self.all.iter().any(|other| other.0 == id) {
            return Err(refuse(format!("-chardev {text}: duplicate ID `{id}`")));
        }
        self.all.push((id, device, false));
        Ok(())
    }

    /// Returns the device that `what` names.
    ///
    /// # Errors
    /// It does not exist, or another line has it: code 64.
    pub fn connect(&mut self, what: &str, id: &str) -> Result<Target, Failure> {
        let Some((_, device, is_used)) = self.all.iter_mut().find(|device| device.0 == id) else {
            return Err(refuse(format!("{what}: no -chardev has the ID `{id}`")));
        };
        if std::mem::replace(is_used, true) {
            return Err(refuse(format!("{what}: -chardev `{id}` is in use by another device")));
        }
        Ok(device.target.clone())
    }

    /// Returns whether QEMU's monitor shares the device with this ID.
    pub fn is_shared(&self, id: &str) -> bool {
        self.all.iter().any(|(other, device, _)| other == id && device.is_shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chardev(text: &str) -> (String, Chardev) {
        Chardev::parse(text).unwrap_or_else(|failure| panic!("{failure}"))
    }

    #[test]
    fn kinds() {
        let target = |text: &str| chardev(text).1.target;
        assert_eq!(chardev("null,id=for-ttyS0").0, "for-ttyS0");
        assert_eq!(target("null,id=a"), Target::Null);
        assert_eq!(target("stdio,id=a,signal=off"), Target::Stdio);
        assert_eq!(
            target("file,id=a,path=/proc/self/fd/2"),
            Target::File("/proc/self/fd/2".into())
        );
        assert_eq!(target("file,path=a,,b,id=a"), Target::File("a,b".into()));
        for text in ["socket,id=a,path=s,server=on,wait=off", "socket,path=s,server,nowait,id=a"] {
            assert_eq!(target(text), Target::Unix("s".into()));
        }
        assert!(chardev("stdio,id=a,mux=on").1.is_shared);
        assert!(!chardev("stdio,id=stdin,signal=on,mux=off").1.is_shared);
    }

    #[test]
    fn wrong_kinds() {
        for (text, code, said) in [
            ("stdio", 64, "`id` is missing"),
            ("id=a", 64, "`backend` is missing"),
            ("file,id=a", 64, "`path` is missing"),
            ("stdio,id=a,mux=perhaps", 64, "on or off"),
            ("null,id=a,speed=9", 64, "unknown parameter `speed`"),
            ("file,id=a,path=p,append=on", 69, "appended"),
            ("socket,id=a,path=s", 69, "server=on"),
            ("socket,id=a,host=h,port=1,server=on", 69, "Unix sockets"),
            ("spicevmc,id=a", 69, "`spicevmc` is none of"),
        ] {
            let failure = Chardev::parse(text).unwrap_err();
            assert_eq!(failure.code(), code, "{text}");
            assert!(failure.to_string().contains(said), "{text}: {failure}");
        }
    }

    #[test]
    fn serial_lines() {
        let target = |text: &str| Chardev::serial(text).unwrap().target;
        assert_eq!(target("stdio"), Target::Stdio);
        assert!(Chardev::serial("mon:stdio").unwrap().is_shared);
        assert_eq!(target("none"), Target::Null);
        assert_eq!(target("file:a:b"), Target::File("a:b".into()));
        assert_eq!(target("unix:/run/s,server,nowait"), Target::Unix("/run/s".into()));
        for text in ["tcp::4444,server", "vc", "file:", "/dev/ttyS0", "stdio:x"] {
            assert_eq!(Chardev::serial(text).unwrap_err().code(), 69, "{text}");
        }
        assert_eq!(Chardev::serial("").unwrap_err().code(), 64);
    }

    #[test]
    fn identifiers() {
        let mut all = Chardevs::default();
        all.add("null,id=a").unwrap();
        assert!(all.add("stdio,id=a").unwrap_err().to_string().contains("duplicate ID `a`"));
        assert_eq!(all.connect("-serial", "a").unwrap(), Target::Null);
        assert!(all.connect("-serial", "a").unwrap_err().to_string().contains("in use"));
        assert!(all.connect("-device x", "b").unwrap_err().to_string().contains("ID `b`"));
    }
}
