//! Scripts for the 16550A.

use proptest::prelude::*;
use vmm_bus::testing::{Script, ScriptStream};
use vmm_bus::{Device, WAKE_INPUT};
use vmm_dev::pc::uart::{Uart, spec::*};

/// A UART as a driver initialises it: FIFOs on with trigger level 8, OUT2 on.
fn ready(env: &mut Script, ier: u8) -> Uart {
    let mut uart = Uart::new();
    env.outb(&mut uart, IIR, FCR_ENABLE | FCR_CLEAR_RX | FCR_CLEAR_TX | 0x80);
    env.outb(&mut uart, MCR, MCR_DTR | MCR_RTS | MCR_OUT2);
    env.outb(&mut uart, IER, ier);
    uart
}

#[test]
fn a_driver_finds_a_16550a() {
    let (mut env, mut uart) = (Script::new(), Uart::new());
    env.outb(&mut uart, IER, 0xff);
    assert_eq!(env.inb(&mut uart, IER), IER_MASK, "no bits of later chips");
    env.outb(&mut uart, IER, 0);
    env.outb(&mut uart, SCR, 0x5a);
    assert_eq!(env.inb(&mut uart, SCR), 0x5a);
    env.outb(&mut uart, MCR, MCR_LOOP | MCR_OUT2 | MCR_RTS);
    assert_eq!(env.inb(&mut uart, MSR) & 0xf0, MSR_DCD | MSR_CTS);
    env.outb(&mut uart, MCR, 0);
    env.outb(&mut uart, IIR, FCR_ENABLE);
    assert_eq!(env.inb(&mut uart, IIR), IIR_FIFO | IIR_NONE);
    env.outb(&mut uart, LCR, LCR_DLAB | 3);
    env.outb(&mut uart, DATA, 0x34);
    env.outb(&mut uart, IER, 0x12);
    assert_eq!((env.inb(&mut uart, DATA), env.inb(&mut uart, IER)), (0x34, 0x12));
    env.outb(&mut uart, LCR, 3);
    assert_eq!(env.inb(&mut uart, IER), 0);
    assert_eq!(env.inb(&mut uart, LSR), LSR_THRE | LSR_TEMT);
}

#[test]
fn polled_output_has_no_other_effect() {
    let (mut env, mut uart) = (Script::new(), Uart::new());
    for byte in b"hello" {
        assert_ne!(env.inb(&mut uart, LSR) & LSR_THRE, 0);
        env.outb(&mut uart, DATA, *byte);
    }
    assert_eq!(env.stream.output, b"hello");
    assert!(env.edges.is_empty() && env.deadlines.is_empty());
}

#[test]
fn transmitter_interrupt_on_enable_and_after_each_batch() {
    let mut env = Script::new();
    let mut uart = ready(&mut env, IER_TX);
    assert!(env.line(0), "an empty transmitter interrupts when that is enabled");
    assert_eq!(env.inb(&mut uart, IIR), IIR_FIFO | IIR_TX);
    assert!(!env.line(0), "reading the cause acknowledges it");
    assert_eq!(env.inb(&mut uart, IIR), IIR_FIFO | IIR_NONE);
    env.outb(&mut uart, DATA, b'x');
    assert!(env.line(0));
    env.outb(&mut uart, DATA, b'y');
    assert!(env.line(0));
    assert_eq!(env.rises(0), 3, "an edge without a read of the cause");
    env.outb(&mut uart, IER, 0);
    env.outb(&mut uart, IER, IER_TX);
    assert!(env.line(0), "drivers test for this");
    assert_eq!(env.rises(0), 4);
}

#[test]
fn refused_output_waits_and_then_interrupts() {
    let mut env =
        Script { stream: ScriptStream { room: Some(1), ..Default::default() }, ..Script::new() };
    let mut uart = ready(&mut env, IER_TX);
    env.inb(&mut uart, IIR);
    for byte in b"abc" {
        env.outb(&mut uart, DATA, *byte);
    }
    assert_eq!(env.stream.output, b"a");
    assert_eq!(env.inb(&mut uart, LSR) & (LSR_THRE | LSR_TEMT), 0);
    assert!(!env.line(0));
    env.stream.room = Some(1);
    uart.wake(WAKE_INPUT, &mut env);
    assert!(!env.line(0), "one byte is left");
    env.stream.room = None;
    uart.wake(WAKE_INPUT, &mut env);
    assert!(env.line(0));
    assert_eq!(env.stream.output, b"abc");
    assert_ne!(env.inb(&mut uart, LSR) & LSR_TEMT, 0);
}

#[test]
fn received_data_interrupts_at_the_trigger_or_after_a_pause() {
    let mut env = Script::new();
    let mut uart = ready(&mut env, IER_RX);
    env.send(&mut uart, b"1234567");
    assert!(!env.line(0));
    env.send(&mut uart, b"8");
    assert!(env.line(0));
    assert_eq!(env.inb(&mut uart, IIR), IIR_FIFO | IIR_RX);
    assert_eq!(env.inb(&mut uart, DATA), b'1');
    assert!(!env.line(0), "below the trigger");
    // 40 bits at divisor 12.
    env.advance(&mut uart, 40 * 12 * BIT_NANOS - 1);
    assert!(!env.line(0));
    env.advance(&mut uart, 1);
    assert!(env.line(0));
    assert_eq!(env.inb(&mut uart, IIR), IIR_FIFO | IIR_TIMEOUT);
    let rest: Vec<u8> = (0..7).map(|_| env.inb(&mut uart, DATA)).collect();
    assert_eq!(rest, b"2345678");
    assert!(!env.line(0) && env.deadlines.is_empty());
    assert_eq!(env.inb(&mut uart, LSR) & LSR_DATA, 0);
}

#[test]
fn input_beyond_the_fifo_stays_outside() {
    let mut env = Script::new();
    let mut uart = ready(&mut env, IER_RX);
    let text: Vec<u8> = (0..100).collect();
    env.send(&mut uart, &text);
    assert_eq!(env.stream.input.len(), 84);
    let read: Vec<u8> = (0..100).map(|_| env.inb(&mut uart, DATA)).collect();
    assert_eq!(read, text);
    assert_eq!(env.inb(&mut uart, LSR) & (LSR_DATA | LSR_OVERRUN), 0);
}

#[test]
fn input_waits_for_a_driver_that_is_ready() {
    let (mut env, mut uart) = (Script::new(), Uart::new());
    env.send(&mut uart, b"early");
    for _ in 0..3 {
        env.outb(&mut uart, IIR, FCR_ENABLE | FCR_CLEAR_RX | FCR_CLEAR_TX);
    }
    // Linux prints without interrupts, and clears input that its driver might find.
    for byte in b"printed" {
        assert_eq!(env.inb(&mut uart, LSR), LSR_THRE | LSR_TEMT);
        env.outb(&mut uart, DATA, *byte);
    }
    for register in [LSR, DATA, IIR, MSR, LSR, DATA, IIR, MSR] {
        env.inb(&mut uart, register);
    }
    // Linux probes for interrupts.
    env.outb(&mut uart, IER, IER_MASK);
    env.outb(&mut uart, IER, 0);
    assert_eq!(env.stream.input.len(), 5);
    env.outb(&mut uart, IER, IER_RX);
    env.outb(&mut uart, MCR, MCR_OUT2);
    // It enables the FIFOs last.
    env.outb(&mut uart, IIR, 0);
    env.outb(&mut uart, IIR, FCR_ENABLE | FCR_CLEAR_RX);
    let read: Vec<u8> = (0..5).map(|_| env.inb(&mut uart, DATA)).collect();
    assert_eq!(read, b"early");
}

/// The host reports input only if it had none: the chip of a further boot gets no report of input
/// that arrived before.
#[test]
fn input_of_before_is_received() {
    let mut env = Script::new();
    env.stream.input.extend(b"ab");
    let mut uart = Uart::new();
    env.outb(&mut uart, IIR, FCR_ENABLE | FCR_CLEAR_RX | FCR_CLEAR_TX);
    env.outb(&mut uart, MCR, MCR_OUT2);
    env.outb(&mut uart, IER, IER_RX);
    assert!(env.line(0));
    assert_eq!([0; 2].map(|_| env.inb(&mut uart, DATA)), *b"ab");
    env.stream.input.push_back(b'c');
    let mut uart = Uart::new();
    let polls = (0..20).take_while(|_| env.inb(&mut uart, LSR) & LSR_DATA == 0).count();
    assert_eq!((polls, env.inb(&mut uart, DATA)), (8, b'c'));
}

#[test]
fn polling_receives_input() {
    let (mut env, mut uart) = (Script::new(), Uart::new());
    env.send(&mut uart, b"ab");
    for _ in 0..8 {
        assert_eq!(env.inb(&mut uart, LSR) & LSR_DATA, 0);
    }
    for byte in *b"ab" {
        assert_ne!(env.inb(&mut uart, LSR) & LSR_DATA, 0);
        assert_eq!(env.inb(&mut uart, DATA), byte);
    }
    assert_eq!(env.inb(&mut uart, LSR) & LSR_DATA, 0);
}

#[test]
fn loop_back_returns_bytes_and_overruns() {
    let mut env = Script::new();
    let mut uart = ready(&mut env, IER_LINE);
    env.outb(&mut uart, MCR, MCR_LOOP | MCR_OUT2);
    env.send(&mut uart, b"outside");
    for byte in 0..17 {
        env.outb(&mut uart, DATA, byte);
    }
    assert!(env.line(0) && env.stream.output.is_empty());
    assert_eq!(env.inb(&mut uart, IIR), IIR_FIFO | IIR_LINE);
    assert_ne!(env.inb(&mut uart, LSR) & LSR_OVERRUN, 0);
    assert_eq!(env.inb(&mut uart, LSR) & LSR_OVERRUN, 0, "cleared by reading");
    for byte in 0..16 {
        assert_eq!(env.inb(&mut uart, DATA), byte);
    }
    env.outb(&mut uart, LCR, LCR_BREAK);
    assert_ne!(env.inb(&mut uart, LSR) & LSR_BREAK, 0);
    env.outb(&mut uart, MCR, MCR_OUT2);
    for _ in 0..8 {
        assert_eq!(env.inb(&mut uart, LSR) & LSR_DATA, 0, "the guest does not wait for data yet");
    }
    assert_ne!(env.inb(&mut uart, LSR) & LSR_DATA, 0);
    assert_eq!(env.inb(&mut uart, DATA), b'o', "the receiver is connected again");
}

#[test]
fn modem_changes_interrupt_and_clear_by_reading() {
    let mut env = Script::new();
    let mut uart = ready(&mut env, IER_MODEM);
    env.outb(&mut uart, MCR, MCR_LOOP | MCR_OUT2);
    assert!(env.line(0));
    assert_eq!(env.inb(&mut uart, IIR), IIR_FIFO | IIR_MODEM);
    assert_eq!(env.inb(&mut uart, MSR), MSR_DCD | 0x3, "CTS and DSR have changed");
    assert!(!env.line(0));
    assert_eq!(env.inb(&mut uart, MSR), MSR_DCD);
}

#[test]
fn out2_lets_the_interrupt_through() {
    let mut env = Script::new();
    let mut uart = ready(&mut env, IER_TX);
    assert!(env.line(0));
    env.outb(&mut uart, MCR, 0);
    assert!(!env.line(0));
}

#[test]
fn reset_lowers_the_line_and_keeps_the_outside() {
    let mut env = Script::new();
    let mut uart = ready(&mut env, IER_TX | IER_RX);
    let text: Vec<u8> = (0..20).collect();
    env.send(&mut uart, &text);
    uart.reset(&mut env);
    assert!(!env.line(0) && env.deadlines.is_empty());
    assert_eq!(env.stream.input.len(), 4);
    env.outb(&mut uart, IIR, FCR_ENABLE);
    env.outb(&mut uart, MCR, MCR_OUT2);
    env.outb(&mut uart, IER, IER_RX);
    assert_eq!(env.inb(&mut uart, DATA), 16);
}

proptest! {
    /// At any pace of both sides, a guest that polls the line status loses no byte.
    #[test]
    fn loses_nothing(fifo: bool, steps in prop::collection::vec((0_u8..5, 0_usize..24), 1..200)) {
        let mut env = Script { stream: ScriptStream { room: Some(0), ..Default::default() }, ..Script::new() };
        let mut uart = Uart::new();
        env.outb(&mut uart, IIR, if fifo { FCR_ENABLE } else { 0 });
        let (mut sent, mut received, mut written) = (0_usize, Vec::new(), 0_usize);
        let read = |uart: &mut Uart, env: &mut Script, received: &mut Vec<u8>, n: usize| {
            for _ in 0..n {
                if env.inb(uart, LSR) & LSR_DATA != 0 {
                    received.push(env.inb(uart, DATA));
                }
            }
        };
        for (what, n) in steps {
            match what {
                0 => {
                    let bytes: Vec<u8> = (sent..sent + n).map(|b| b as u8).collect();
                    sent += n;
                    env.send(&mut uart, &bytes);
                }
                1 => read(&mut uart, &mut env, &mut received, n),
                2 => {
                    env.stream.room = Some(n);
                    uart.wake(WAKE_INPUT, &mut env);
                }
                3 => env.advance(&mut uart, n as u64 * 1_000_000),
                _ => {
                    if env.inb(&mut uart, LSR) & LSR_THRE != 0 {
                        for _ in 0..n.min(if fifo { FIFO } else { 1 }) {
                            env.outb(&mut uart, DATA, written as u8);
                            written += 1;
                        }
                    }
                }
            }
        }
        env.stream.room = None;
        uart.wake(WAKE_INPUT, &mut env);
        // The first reads are not for data.
        read(&mut uart, &mut env, &mut received, sent + 8);
        let counted = |n: usize| (0..n).map(|b| b as u8).collect::<Vec<u8>>();
        prop_assert_eq!(received, counted(sent));
        prop_assert_eq!(&env.stream.output, &counted(written));
    }
}
