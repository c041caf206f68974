//! Name server at a loopback address of the guest, as engines have it in the network namespace of a
//! container: questions go to the host, which asks the engine's ([`proto::agent::Purpose`]).

use crate::PAUSE;
use proto::agent::{Answer, DNS_PORT, DnsMessage, MAX_DNS_MESSAGE, VERSION, io as wire};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, sleep};
use std::time::Duration;

/// Most questions without an answer. The oldest is forgotten: its client asks again.
const MAX_QUESTIONS: usize = 256;
/// Most open connections of clients, and the time after which one without a question ends
/// (RFC 7766, section 6.2.3).
const MAX_STREAMS: usize = 64;
const IDLE: Duration = Duration::from_secs(10);

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
    Builder::new().spawn(move || own.take_streams(&listener))?;
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

    /// Takes the connections of clients, for ever.
    fn take_streams(self: Arc<Self>, listener: &TcpListener) {
        let open = Arc::new(());
        for stream in listener.incoming() {
            // The next attempt would fail at once, too.
            let Ok(stream) = stream else {
                sleep(PAUSE);
                continue;
            };
            // One for each connection, and that of this function.
            if Arc::strong_count(&open) > MAX_STREAMS {
                continue;
            }
            let (own, counted) = (Arc::clone(&self), Arc::clone(&open));
            // Without memory for a thread, the client sees that its connection ends.
            let _ = Builder::new().spawn(move || {
                own.take_stream(stream);
                drop(counted);
            });
        }
    }

    /// Takes the questions of a connection until one side ends it.
    fn take_stream(&self, mut stream: TcpStream) {
        if stream.set_read_timeout(Some(IDLE)).is_err() {
            return;
        }
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

    #[test]
    fn connections_are_limited() {
        let (host, own) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let host_file = Mutex::new(File::from(std::os::fd::OwnedFd::from(own)));
        let resolver = Arc::new(Resolver { host: host_file, questions: Mutex::default() });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("an address");
        Builder::new().spawn(move || resolver.take_streams(&listener)).expect("a thread");
        let connect = || TcpStream::connect(address).expect("a listener");
        // The order in which they are accepted is that in which they connect.
        let streams: Vec<_> = (0..MAX_STREAMS).map(|_| connect()).collect();
        let ended = wire::receive_dns(connect()).map_err(|error| error.kind());
        assert_eq!(ended, Err(io::ErrorKind::UnexpectedEof));
        let mut room = Vec::new();
        for stream in &streams {
            wire::send_dns(stream, b"question").expect("it is read");
            wire::receive(&host, &mut room).expect("a message").expect("one");
        }
    }
}
