//! Interval timer 8254 with the speaker port.
//!
//! State: per channel the mode, the count, the start of counting, latches; port 0x61.
//! Features: channels 0 to 2, modes 0 to 5, latch and read-back commands, gate and output of
//! channel 2 and the refresh toggle in port 0x61, IRQ0 (line 0). Counts are derived from time; no
//! tick is simulated. Of channel 0's output the rising edges matter: if the chip's output is low
//! for a part of each period, line 0 falls and rises again at its end. Periods that the host was
//! late for, and edges closer together than [`spec::SHORTEST_PERIOD`], become one edge.
//! Missing: BCD counting (reported, counts in binary), the end of the current period before a new
//! count in modes 2 and 3 is used (it is used at once), sound.
//! Documentation: Intel 8254 data sheet (231164); Intel ICH9 datasheet, section 13.7.1 (port 61h).

use vmm_bus::{Access, Device, Env, NEVER, Nanos, Ticks};

/// Registers.
pub mod spec {
    /// The last of the channels, which are offsets 0 to 2 (ports 0x40 to 0x42).
    pub const CHANNEL_2: u64 = 2;
    /// WO: control word (port 0x43).
    pub const CONTROL: u64 = 3;
    /// RW: system control port B (port 0x61).
    pub const PORT_B: u64 = 4;
    /// Input clock.
    pub const HZ: u64 = 1_193_182;

    /// Control word, bits 6..=7: read-back command instead of a channel.
    pub const READ_BACK: u8 = 3;
    /// Read-back: do not latch the count.
    pub const READ_BACK_NO_COUNT: u8 = 1 << 5;
    /// Read-back: do not latch the status.
    pub const READ_BACK_NO_STATUS: u8 = 1 << 4;
    /// Control word: count in BCD.
    pub const BCD: u8 = 1 << 0;
    /// Status: the output is high.
    pub const STATUS_OUTPUT: u8 = 1 << 7;
    /// Status: no complete count has been written yet.
    pub const STATUS_NULL: u8 = 1 << 6;

    /// RW: gate of channel 2.
    pub const PORT_B_GATE2: u8 = 1 << 0;
    /// The bits of port B that read back as written.
    pub const PORT_B_STORED: u8 = 0x0f;
    /// RO: toggles with each memory refresh.
    pub const PORT_B_REFRESH: u8 = 1 << 4;
    /// RO: output of channel 2.
    pub const PORT_B_OUT2: u8 = 1 << 5;
    /// Time between two refreshes, in nanoseconds.
    pub const REFRESH_NANOS: u64 = 15_085;

    /// Minimum distance of edges of channel 0, in nanoseconds.
    pub const SHORTEST_PERIOD: u64 = 50_000;
}
use spec::*;

const CLOCK: Ticks = Ticks::new(HZ);

/// Bytes of a count that are written and read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bytes {
    Low = 1,
    High,
    Both,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Channel {
    mode: u8,
    bytes: Bytes,
    bcd: bool,
    /// 1 to 65536.
    count: u32,
    /// A complete count has been written since the mode was.
    loaded: bool,
    gate: bool,
    /// Modes 1 and 5: the gate has risen since the count was written.
    triggered: bool,
    /// Tick at which the count was loaded, adjusted for pauses since.
    start: u64,
    /// Ticks counted when the gate fell.
    held: u64,
    low_written: Option<u8>,
    next_is_high: bool,
    latched_count: Option<u16>,
    latched_status: Option<u8>,
}

impl Channel {
    const fn new(gate: bool) -> Self {
        Self {
            mode: 0,
            bytes: Bytes::Both,
            bcd: false,
            count: 0x1_0000,
            loaded: false,
            gate,
            triggered: false,
            start: 0,
            held: 0,
            low_written: None,
            next_is_high: false,
            latched_count: None,
            latched_status: None,
        }
    }

    fn needs_trigger(&self) -> bool {
        matches!(self.mode, 1 | 5)
    }

    fn periodic(&self) -> bool {
        matches!(self.mode, 2 | 3)
    }

    /// Ticks counted; `None` before counting has begun.
    fn elapsed(&self, tick: u64) -> Option<u64> {
        if !self.loaded || self.needs_trigger() && !self.triggered {
            None
        } else if self.gate || self.needs_trigger() {
            Some(tick.saturating_sub(self.start))
        } else {
            Some(self.held)
        }
    }

    fn value(&self, tick: u64) -> u16 {
        let count = u64::from(self.count);
        let elapsed = self.elapsed(tick).unwrap_or(0);
        let value = match self.mode {
            2 => count - elapsed % count,
            3 => {
                let (even, high, at) = (count & !1, count.div_ceil(2), elapsed % count);
                even - 2 * if at < high { at } else { at - high }
            }
            _ => count.wrapping_sub(elapsed),
        };
        value as u16
    }

    fn output(&self, tick: u64) -> bool {
        let count = u64::from(self.count);
        let Some(elapsed) = self.elapsed(tick) else { return self.mode != 0 };
        match self.mode {
            0 | 1 => elapsed >= count,
            2 => !self.gate || elapsed % count != count - 1,
            3 => !self.gate || elapsed % count < count.div_ceil(2),
            _ => elapsed != count,
        }
    }

    fn set_gate(&mut self, gate: bool, tick: u64) {
        if gate == self.gate {
            return;
        }
        if gate && (self.periodic() || self.needs_trigger()) {
            self.start = tick;
            self.triggered = true;
        } else if gate {
            self.start = tick.saturating_sub(self.held);
        } else {
            self.held = self.elapsed(tick).unwrap_or(0);
        }
        self.gate = gate;
    }

    fn control(&mut self, mode: u8, bytes: Bytes, bcd: bool) {
        // Only the gate, which is an input, is kept.
        *self = Self { mode, bytes, bcd, ..Self::new(self.gate) };
    }

    fn write(&mut self, value: u8, tick: u64) {
        let count = match (self.bytes, self.low_written.take()) {
            (Bytes::Low, _) => u32::from(value),
            (Bytes::High, _) => u32::from(value) << 8,
            (Bytes::Both, Some(low)) => u32::from(value) << 8 | u32::from(low),
            (Bytes::Both, None) => {
                self.low_written = Some(value);
                if self.mode == 0 {
                    // The first byte stops counting.
                    self.loaded = false;
                }
                return;
            }
        };
        self.count = if count == 0 { 0x1_0000 } else { count };
        self.loaded = true;
        self.held = 0;
        if !self.needs_trigger() {
            self.start = tick;
        }
    }

    fn status(&self, tick: u64) -> u8 {
        let output = if self.output(tick) { STATUS_OUTPUT } else { 0 };
        let null = if self.loaded { 0 } else { STATUS_NULL };
        output | null | (self.bytes as u8) << 4 | self.mode << 1 | u8::from(self.bcd)
    }

    fn read(&mut self, tick: u64) -> u8 {
        if let Some(status) = self.latched_status.take() {
            return status;
        }
        let value = self.latched_count.unwrap_or_else(|| self.value(tick));
        let high = match self.bytes {
            Bytes::Low => false,
            Bytes::High => true,
            Bytes::Both => {
                self.next_is_high = !self.next_is_high;
                !self.next_is_high
            }
        };
        if self.bytes != Bytes::Both || high {
            self.latched_count = None;
        }
        (if high { value >> 8 } else { value }) as u8
    }

    fn latch_count(&mut self, tick: u64) {
        if self.latched_count.is_none() {
            self.latched_count = Some(self.value(tick));
        }
    }

    /// The next tick after `tick` at which the output has risen.
    fn next_rise(&self, tick: u64) -> Option<u64> {
        let count = u64::from(self.count);
        let elapsed = self.elapsed(tick)?;
        let rise = match self.mode {
            2 | 3 => (elapsed / count + 1) * count,
            0 | 1 if elapsed < count => count,
            4 | 5 if elapsed <= count => count + 1,
            _ => return None,
        };
        Some(self.start.saturating_add(rise))
    }
}

/// An 8254. Offsets 0 to 3 are ports 0x40 to 0x43, offset 4 is port 0x61; line 0 is IRQ0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pit {
    channels: [Channel; 3],
    port_b: u8,
    /// Tick of the edge that timer 0 waits for.
    rise: Option<u64>,
}

impl Default for Pit {
    fn default() -> Self {
        Self::new()
    }
}

impl Pit {
    /// Creates the chip in its power-on state: no channel counts.
    pub const fn new() -> Self {
        Self {
            channels: [Channel::new(true), Channel::new(true), Channel::new(false)],
            port_b: 0,
            rise: None,
        }
    }

    fn tick(env: &dyn Env) -> u64 {
        CLOCK.in_nanos(env.now())
    }

    /// Sets the line and the next edge after channel 0 has been programmed.
    fn restart(&mut self, env: &mut dyn Env) {
        let tick = Self::tick(env);
        let channel = &self.channels[0];
        // The low part of a period is shown only at its end.
        let level = channel.periodic() || channel.output(tick);
        self.rise = channel.next_rise(tick);
        env.set_line(0, level);
        self.arm(env);
    }

    fn arm(&self, env: &mut dyn Env) {
        env.arm(0, self.rise.map_or(NEVER, |tick| CLOCK.nanos(tick)));
    }

    fn control(&mut self, value: u8, env: &mut dyn Env) {
        let tick = Self::tick(env);
        let selected = value >> 6;
        if selected == READ_BACK {
            for (i, channel) in self.channels.iter_mut().enumerate() {
                if value & 2 << i != 0 {
                    if value & READ_BACK_NO_COUNT == 0 {
                        channel.latch_count(tick);
                    }
                    if value & READ_BACK_NO_STATUS == 0 && channel.latched_status.is_none() {
                        channel.latched_status = Some(channel.status(tick));
                    }
                }
            }
            return;
        }
        let channel = &mut self.channels[usize::from(selected)];
        let bytes = match value >> 4 & 3 {
            0 => return channel.latch_count(tick),
            1 => Bytes::Low,
            2 => Bytes::High,
            _ => Bytes::Both,
        };
        // Modes 6 and 7 are aliases of 2 and 3.
        let mode = match value >> 1 & 7 {
            mode @ 6.. => mode - 4,
            mode => mode,
        };
        if value & BCD != 0 {
            env.missing("8254: BCD", value.into());
        }
        channel.control(mode, bytes, value & BCD != 0);
        if selected == 0 {
            self.restart(env);
        }
    }

    fn read_port_b(&self, env: &dyn Env) -> u8 {
        let now: Nanos = env.now();
        let refresh = if (now / REFRESH_NANOS) & 1 != 0 { PORT_B_REFRESH } else { 0 };
        let output = self.channels[2].output(CLOCK.in_nanos(now));
        self.port_b | refresh | if output { PORT_B_OUT2 } else { 0 }
    }
}

impl Device for Pit {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        match access.offset {
            offset @ ..=CHANNEL_2 => self.channels[offset as usize].read(Self::tick(env)).into(),
            PORT_B => self.read_port_b(env).into(),
            _ => access.open_bus(),
        }
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        let value = value as u8;
        match access.offset {
            offset @ ..=CHANNEL_2 => {
                self.channels[offset as usize].write(value, Self::tick(env));
                if offset == 0 {
                    self.restart(env);
                }
            }
            CONTROL => self.control(value, env),
            PORT_B => {
                self.port_b = value & PORT_B_STORED;
                self.channels[2].set_gate(value & PORT_B_GATE2 != 0, Self::tick(env));
            }
            _ => {}
        }
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        let Some(rise) = self.rise.filter(|_| timer == 0) else { return };
        let now = env.now();
        let tick = CLOCK.in_nanos(now);
        if tick >= rise {
            if self.channels[0].mode != 0 {
                env.set_line(0, false);
            }
            env.set_line(0, true);
            let next = CLOCK.in_nanos(now.saturating_add(SHORTEST_PERIOD));
            self.rise =
                self.channels[0].periodic().then(|| self.channels[0].next_rise(next)).flatten();
        }
        self.arm(env);
    }

    fn reset(&mut self, env: &mut dyn Env) {
        *self = Self::new();
        env.set_line(0, false);
        env.arm(0, NEVER);
    }
}
