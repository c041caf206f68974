//! Agents of tests: threads with the messages of one.

use crate::vm::AgentVm;
use proto::agent::{Answer, io as wire};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::{self, JoinHandle};

/// Encodes an answer.
pub fn frame(answer: &Answer<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::send(&mut bytes, answer).expect("it fits");
    bytes
}

/// Starts an agent of a VM in `folder`, which takes one connection, sends one of these answers
/// after each message, and waits for the connection's end.
pub fn agent(folder: &Path, answers: Vec<Vec<u8>>) -> (AgentVm, JoinHandle<()>) {
    let vm = AgentVm::attach(folder.to_owned());
    let listener = UnixListener::bind(vm.socket()).expect("a socket");
    let thread = thread::spawn(move || {
        let stream = listener.accept().expect("a connection").0;
        let mut reader = BufReader::new(stream.try_clone().expect("a copy"));
        reader.read_line(&mut String::new()).expect("a line");
        (&stream).write_all(b"OK 1\n").expect("it is read");
        let mut room = Vec::new();
        for answer in answers {
            wire::receive(&mut reader, &mut room).expect("a message").expect("one");
            (&stream).write_all(&answer).expect("it is read");
        }
        // The other side may end it at any time.
        let _ = wire::receive(&mut reader, &mut room);
    });
    (vm, thread)
}
