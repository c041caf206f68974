//! Configuration of shared directories: `--share`.

use hosted_command::failure::{self, Failure};
use hosted_command::keyvalue;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Longest tag in bytes.
const TAG: usize = 32;

/// Configuration of a shared directory: `[[share]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ShareConfig {
    /// Folder on the host.
    pub path: PathBuf,
    /// Mount tag for the guest.
    #[schemars(length(min = 1, max = 32))]
    pub tag: Tag,
    /// Read-only for the guest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ro: bool,
    /// Files with the guest's owners, set-user-ID bits and device nodes; for root only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub owners: bool,
}

/// Mount tag: 1 to 32 printable ASCII characters.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String")]
pub struct Tag(pub(crate) String);

impl TryFrom<String> for Tag {
    type Error = String;

    fn try_from(tag: String) -> Result<Self, String> {
        match (1..=TAG).contains(&tag.len()) && tag.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(tag)),
            false => {
                Err(format!("the tag `{tag}` must have 1 to {TAG} printable ASCII characters"))
            }
        }
    }
}

/// Parses `DIR:TAG[,KEY=VALUE]...`.
pub fn parse(text: &str) -> Result<ShareConfig, Failure> {
    let (place, options) = text.split_once(',').unwrap_or((text, ""));
    let parsed = match place.rsplit_once(':') {
        Some((path, tag)) if !path.is_empty() => {
            let comma = if options.is_empty() { "" } else { "," };
            // The key is optional, and the folder's name may have an equals sign.
            let path = path.strip_prefix("path=").unwrap_or(path);
            let text = format!("path={path},tag={tag}{comma}{options}");
            keyvalue::parse("--share", "path", &text)
        }
        _ => {
            let text = format!("--share {text}: expected DIR:TAG");
            Err(Failure::new(failure::BAD_CONFIG, text))
        }
    };
    parsed.map_err(|failure| failure.help("use --share DIR:TAG, followed by ,ro=on or ,owners=on"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions() {
        let share = |path: &str, tag: &str, ro, owners| ShareConfig {
            path: path.into(),
            tag: Tag(tag.into()),
            ro,
            owners,
        };
        assert_eq!(parse("a:b").unwrap(), share("a", "b", false, false));
        assert_eq!(parse("/a:b:c,ro=on").unwrap(), share("/a:b", "c", true, false));
        assert_eq!(parse("/srv/a=b:c").unwrap(), share("/srv/a=b", "c", false, false));
        assert_eq!(parse("path=a:b").unwrap(), share("a", "b", false, false));
        assert_eq!(parse("a:b,owners=on").unwrap(), share("a", "b", false, true));
        let long = format!("a:{}", "x".repeat(TAG + 1));
        for text in ["", "a", "a:", ":b", "a:b,ro", "a:b,rw=on", "a:b c", &long] {
            assert_eq!(parse(text).unwrap_err().code(), failure::BAD_CONFIG, "{text}");
        }
    }
}
