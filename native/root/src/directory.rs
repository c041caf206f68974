//! Memory that root shares with a console multiplexer: names of its clients, and root's log.

use native_rt::{Notification, Window, log};
use proto::console::directory::{ENTRY, LENGTH, LOG_SESSION, entry};

/// The region, which belongs to the multiplexer's child.
pub struct Directory {
    window: Window,
    notification: Notification,
}

impl Directory {
    /// Pages of the region.
    pub const PAGES: u64 = LENGTH / abi::PAGE_SIZE;

    /// Starts to copy the log to an empty region. `notification` is the multiplexer's.
    pub fn new(window: Window, notification: Notification) -> Self {
        let directory = Self { window, notification };
        directory.set(LOG_SESSION, "log");
        log::mirror(Some((window, notification)));
        directory
    }

    /// Names a session; an empty name removes the client.
    pub fn set(&self, session: usize, name: &str) {
        // There are more entries than children.
        let _ = self.window.write((session * ENTRY) as u64, &entry(name));
        // The multiplexer may have just ended.
        let _ = self.notification.signal(proto::console::CHANGED);
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        log::mirror(None);
    }
}
