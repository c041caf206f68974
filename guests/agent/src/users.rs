//! Users and groups by their names, from the guest's own files.

use proto::agent::{CommandUser, MAX_GROUPS};
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Files of users and groups (passwd(5), group(5)).
const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";
/// Longest file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// User of a command.
#[derive(Debug, PartialEq, Eq)]
pub struct ResolvedUser {
    pub user: u32,
    pub group: u32,
    pub groups: Vec<u32>,
    /// Home directory, if the guest knows it.
    pub home: Option<String>,
}

/// Finds the numbers of a command's user.
///
/// # Errors
/// The guest has no such user or group, or its files cannot be read.
pub fn resolve(user: &CommandUser<'_>) -> io::Result<ResolvedUser> {
    match user {
        CommandUser::Ids { user, group, groups } => {
            Ok(ResolvedUser { user: *user, group: *group, groups: groups.to_vec(), home: None })
        }
        CommandUser::Named(text) => find(text, &read(USERS)?, &read(GROUPS)?),
    }
}

/// Reads a file; one that is missing, or not regular, is empty.
fn read(path: &str) -> io::Result<String> {
    let mut bytes = Vec::new();
    match open_regular(Path::new(path)) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidInput) => {}
        file => drop(file?.take(MAX_FILE).read_to_end(&mut bytes)?),
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Opens a regular file of a container, which may have a named pipe in its place, for whose writer
/// this would wait. Another file is invalid input.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let text = format!("read {}: it is not a regular file", path.display());
    Err(io::Error::new(ErrorKind::InvalidInput, text))
}

/// Finds a user, as images name it, in the contents of both files.
fn find(text: &str, users: &str, groups: &str) -> io::Result<ResolvedUser> {
    let (name, stated) = match text.split_once(':') {
        Some((name, group)) => (name, Some(group).filter(|group| !group.is_empty())),
        None => (text, None),
    };
    let name = if name.is_empty() { "0" } else { name };
    let users = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let known = users.into_iter().find_map(|fields| {
        let &[own, _, user, group, _, home, ..] = &fields[..] else { return None };
        let (user, group) = (user.parse::<u32>().ok()?, group.parse::<u32>().ok()?);
        let is_it = own == name || name.parse() == Ok(user);
        is_it.then(|| (own.to_owned(), user, group, home.to_owned()))
    });
    let (own, user, group, home) = match (known, name.parse()) {
        (Some((own, user, group, home)), _) => (Some(own), user, group, home),
        // As other engines have it.
        (None, Ok(user)) => (None, user, 0, "/".to_owned()),
        (None, Err(_)) => return Err(unknown("user", name, USERS)),
    };
    let home = Some(home);
    if let Some(stated) = stated {
        let listed = group_lines(groups).find(|(name, _, _)| *name == stated).map(|it| it.1);
        let group = listed.or_else(|| stated.parse().ok());
        let group = group.ok_or_else(|| unknown("group", stated, GROUPS))?;
        return Ok(ResolvedUser { user, group, groups: Vec::new(), home });
    }
    let of_user = group_lines(groups).filter(|(_, _, members)| {
        own.as_deref().is_some_and(|own| members.split(',').any(|member| member == own))
    });
    let groups = of_user.map(|(_, group, _)| group).take(MAX_GROUPS).collect();
    Ok(ResolvedUser { user, group, groups, home })
}

/// Returns name, number and members of each group.
fn group_lines(groups: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    groups.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, group) = (fields.next()?, fields.next()?, fields.next()?);
        Some((name, group.parse().ok()?, fields.next().unwrap_or_default()))
    })
}

fn unknown(what: &str, name: &str, file: &str) -> io::Error {
    io::Error::other(format!("find the {what} {name} in {file}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = "root:x:0:0:root:/root:/bin/sh\nmalformed\nweb:x:33:34::/srv:/bin/sh\n";
    const GROUPS: &str = "root:x:0:\nweb:x:34:\nlog:x:4:root,web\nmail:x:8:web\nother:x:9:webb\n";

    fn found(text: &str) -> Option<(u32, u32, Vec<u32>, String)> {
        let user = find(text, USERS, GROUPS).ok()?;
        Some((user.user, user.group, user.groups, user.home?))
    }

    #[test]
    fn a_named_pipe_has_no_users() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("passwd");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0)
            .expect("a pipe");
        let text = open_regular(&pipe).expect_err("no file").to_string();
        assert!(text.ends_with("it is not a regular file"), "{text}");
        for path in [pipe.to_str().expect("UTF-8"), "/dev/zero", "/no/such"] {
            assert_eq!(read(path).ok().as_deref(), Some(""));
        }
    }

    #[test]
    fn users_are_named_as_in_images() {
        let is = |user, group, groups: &[u32], home: &str| {
            Some((user, group, groups.to_vec(), home.to_owned()))
        };
        assert_eq!(found(""), is(0, 0, &[4], "/root"));
        assert_eq!(found("web"), is(33, 34, &[4, 8], "/srv"));
        assert_eq!(found("33"), is(33, 34, &[4, 8], "/srv"));
        assert_eq!(found("web:mail"), is(33, 8, &[], "/srv"));
        assert_eq!(found("web:77"), is(33, 77, &[], "/srv"));
        assert_eq!(found("99"), is(99, 0, &[], "/"));
        assert_eq!(found(":mail"), is(0, 8, &[], "/root"));
        assert_eq!(found("unknown"), None);
        assert_eq!(found("web:nogroup"), None);
        assert_eq!(find("", "", "").map(|user| user.user).ok(), Some(0));
    }
}
