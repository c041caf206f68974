//! Name server at a loopback address of the guest, as engines have it in the network namespace of a
//! container: questions go to the host, which asks the engine's ([`proto::agent::Purpose`]).

use proto::agent::{Answer, DNS_PORT, DnsMessage, MAX_DNS_MESSAGE, VERSION, io as wire};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

/// Most questions without an answer. The oldest is forgotten: its client asks again.
const MAX_QUESTIONS: usize = 256;

/// Connection to the host, and what waits for answers.
struct Resolver {
    host: Mutex<File>,
    questions: Mutex<Questions>,
}

#[derive(Default)]
struct Questions {
    last: u32,
    askers: BTreeMap<u32, Asker>,
}

/// Sender of a question.
enum Asker {
    Datagram(SocketAddr),
    Stream(TcpStream),
}

/// Listens at an address, and serves questions until the connection to the host ends.
pub fn serve(connection: &File, address: Ipv4Addr) -> io::Result<()> {
    let listening = UdpSocket::bind((address, DNS_PORT))
        .and_then(|datagrams| Ok((datagrams, TcpListener::bind((address, DNS_PORT))?)));
    let (datagrams, listener) = match listening {
        Ok(listening) => listening,
        Err(error) => {
            let text = format!("listen at {address}:{DNS_PORT}: {error}");
            return wire::send(connection, &Answer::Failed(&text));
        }
    };
    wire::send(connection, &Answer::Welcome { version: VERSION, command: 0 })?;
    let host = Mutex::new(connection.try_clone()?);
    let resolver = Arc::new(Resolver { host, questions: Mutex::default() });
    let datagrams = Arc::new(datagrams);
    let (own, questions) = (Arc::clone(&resolver), Arc::clone(&datagrams));
    Builder::new().spawn(move || own.take_datagrams(&questions))?;
    let own = Arc::clone(&resolver);
    Builder::new().spawn(move || {
        for stream in listener.incoming().flatten() {
            let own = Arc::clone(&own);
            // Without memory for a thread, the client sees that its connection ends.
            let _ = Builder::new().spawn(move || own.take_stream(stream));
        }
    })?;
    let mut room = Vec::new();
    while wire::receive(connection, &mut room)?.is_some() {
        resolver.answer(&wire::read(&room)?, &datagrams);
    }
    Ok(())
}

impl Resolver {
    fn questions(&self) -> MutexGuard<'_, Questions> {
        self.questions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a question to the host.
    fn ask(&self, asker: Asker, is_stream: bool, message: &[u8]) -> io::Result<()> {
        let number = self.questions().add(asker);
        let question = DnsMessage { number, is_stream, message };
        wire::send(&mut *self.host.lock().unwrap_or_else(PoisonError::into_inner), &question)
    }

    /// Takes questions that are datagrams until the host has gone.
    fn take_datagrams(&self, socket: &UdpSocket) {
        let mut room = vec![0; MAX_DNS_MESSAGE];
        loop {
            match socket.recv_from(&mut room) {
                Ok((length, from)) => {
                    if self.ask(Asker::Datagram(from), false, &room[..length]).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Takes the questions of a connection until one side ends it.
    fn take_stream(&self, mut stream: TcpStream) {
        while let Ok(message) = wire::receive_dns(&mut stream) {
            let Ok(own) = stream.try_clone() else { return };
            if self.ask(Asker::Stream(own), true, &message).is_err() {
                return;
            }
        }
    }

    /// Gives an answer of the host to its asker, which may have gone.
    fn answer(&self, answer: &DnsMessage<'_>, datagrams: &UdpSocket) {
        let asker = self.questions().askers.remove(&answer.number);
        match asker {
            Some(Asker::Datagram(to)) => drop(datagrams.send_to(answer.message, to)),
            Some(Asker::Stream(stream)) => drop(wire::send_dns(&stream, answer.message)),
            None => {}
        }
    }
}

impl Questions {
    /// Returns the number of a new question.
    fn add(&mut self, asker: Asker) -> u32 {
        if self.askers.len() == MAX_QUESTIONS {
            self.askers.pop_first();
        }
        self.last = self.last.wrapping_add(1);
        self.askers.insert(self.last, asker);
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_question_is_forgotten() {
        let mut questions = Questions::default();
        let asker = || Asker::Datagram(([127, 0, 0, 1], 9).into());
        for number in 1..=MAX_QUESTIONS as u32 + 1 {
            assert_eq!(questions.add(asker()), number);
        }
        assert_eq!(questions.askers.len(), MAX_QUESTIONS);
        assert!(!questions.askers.contains_key(&1) && questions.askers.contains_key(&2));
    }
}
