//! The user's cache: built kernels and downloaded files, shared by all clones of the source tree.

use crate::failure::{self, Failure};
use crate::programs;
use crate::trust;
use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Name of the folder in the user's cache.
const NAME: &str = "parador";
/// Remedy if the folder cannot be used.
const REMEDY: &str = "set XDG_CACHE_HOME to a folder of yours with free space";

/// Returns the cache folder and creates it if necessary: `$XDG_CACHE_HOME/parador`, else
/// `$HOME/.cache/parador`, else `target/cache/parador` of the source tree that contains `parador`.
///
/// # Errors
/// No such path; the folder cannot be created; or other users may write to it ([`trust::check`]).
pub fn folder() -> Result<PathBuf, Failure> {
    let folder = place()?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| Failure::file("create the folder", &folder, &error).help(REMEDY))?;
    trust::check(&folder)
}

/// Returns the cache folder without creating it; `None` if it does not exist.
pub fn existing() -> Result<Option<PathBuf>, Failure> {
    let folder = place()?;
    match fs::metadata(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::file("read", &folder, &error).help(REMEDY)),
        Ok(_) => trust::check(&folder).map(Some),
    }
}

/// Creates the failure to write to the cache at `folder`, with the remedy.
pub fn failed(folder: &Path, error: &io::Error) -> Failure {
    Failure::file("write to the cache", folder, error).help(REMEDY)
}

fn place() -> Result<PathBuf, Failure> {
    let users = choose(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME"));
    if let Some(folder) = users {
        return Ok(folder);
    }
    if let Some(target) = programs::own_target()? {
        return Ok(target.join("cache").join(NAME));
    }
    let text = "no folder for the cache: neither XDG_CACHE_HOME nor HOME is an absolute path";
    Err(Failure::new(failure::MISSING_FILE, text).help(REMEDY))
}

/// Chooses the folder by these variables. Relative paths are ignored (XDG Base Directory
/// Specification).
fn choose(cache: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |value: Option<OsString>| value.map(PathBuf::from).filter(|p| p.is_absolute());
    let cache = absolute(cache).or_else(|| absolute(home).map(|home| home.join(".cache")));
    cache.map(|cache| cache.join(NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_place() {
        let place = |cache: Option<&str>, home: Option<&str>| {
            choose(cache.map(OsString::from), home.map(OsString::from))
        };
        let is = |path: &str| Some(PathBuf::from(path));
        assert_eq!(place(Some("/c"), Some("/h")), is("/c/parador"));
        assert_eq!(place(None, Some("/h")), is("/h/.cache/parador"));
        assert_eq!(place(Some(""), Some("/h")), is("/h/.cache/parador"));
        assert_eq!(place(Some("relative"), Some("/h")), is("/h/.cache/parador"));
        assert_eq!(place(None, Some("relative")), None);
        assert_eq!(place(None, None), None);
    }
}
