//! Name server of an engine in the network namespace of a container, at a loopback address, as
//! Docker has it for networks that users make. The guest's loopback interface is another one: its
//! agent listens there, and this asks the engine's server.

use crate::mounts::MountPlan;
use crate::tasks::Tasks;
use hosted_command::failure::{Failure, IoContext};
use hosted_command::input;
use proto::agent::{DNS_PORT, DnsMessage, MAX_DNS_MESSAGE, io as wire};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// Path of the list of name servers (resolv.conf(5)).
const LIST: &str = "/etc/resolv.conf";
/// Time limit of a question; clients ask again after 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most questions at a time. Further ones are dropped: their clients ask again.
const MAX_QUESTIONS: usize = 64;

/// Returns the first name server with a loopback address that a container has by its mounts.
pub fn find(mounts: &[MountPlan]) -> Option<Ipv4Addr> {
    let is_list = |mount: &&MountPlan| mount.is_bind() && mount.place == Path::new(LIST);
    let list = &mounts.iter().rfind(is_list)?.source;
    // Whatever else is mounted there lists no server.
    first_loopback(&String::from_utf8_lossy(&input::regular(list).ok()?))
}

fn first_loopback(list: &str) -> Option<Ipv4Addr> {
    let servers = list.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    servers.filter_map(|address| address.trim().parse().ok()).find(Ipv4Addr::is_loopback)
}

/// Asks the server for the guest at the other end, from the network namespace of this thread, until
/// the connection ends.
///
/// # Errors
/// There is no memory for a thread.
pub fn relay(guest: UnixStream, address: Ipv4Addr) -> Result<(), Failure> {
    let serve = move || {
        // It ends with the VM, and if the guest sends what is no question.
        let _ = serve(&guest, (address, DNS_PORT).into());
    };
    Builder::new().spawn(serve).map(drop).os_error("create a thread")
}

fn serve(guest: &UnixStream, server: SocketAddr) -> io::Result<()> {
    let writer = Arc::new(Mutex::new(guest.try_clone()?));
    let tasks = Tasks::new(MAX_QUESTIONS);
    let mut room = Vec::new();
    while wire::receive(guest, &mut room)?.is_some() {
        let question: DnsMessage<'_> = wire::read(&room)?;
        if question.message.len() > MAX_DNS_MESSAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let DnsMessage { number, is_stream, message } = question;
        let (writer, message) = (Arc::clone(&writer), message.to_vec());
        tasks.spawn(move || {
            // Without an answer the client asks again, or another server.
            if let Ok(message) = ask(server, is_stream, &message) {
                let answer = DnsMessage { number, is_stream, message: &message };
                let writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = wire::send(&*writer, &answer);
            }
        });
    }
    Ok(())
}

/// Asks a name server (RFC 1035, section 4.2) and returns its answer.
fn ask(server: SocketAddr, is_stream: bool, question: &[u8]) -> io::Result<Vec<u8>> {
    if is_stream {
        let mut stream = TcpStream::connect_timeout(&server, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        wire::send_dns(&mut stream, question)?;
        return wire::receive_dns(&mut stream);
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(question)?;
    let mut answer = vec![0; MAX_DNS_MESSAGE];
    let length = socket.recv(&mut answer)?;
    answer.truncate(length);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    #[test]
    fn loopback_servers_are_found() {
        let list =
            "search a\nnameserver 10.0.0.1\n nameserver\t127.0.0.11\nnameserver 127.0.0.12\n";
        assert_eq!(first_loopback(list), Some(Ipv4Addr::new(127, 0, 0, 11)));
        for without in ["", "nameserver ::1", "nameserver 10.0.0.1", "#nameserver 127.0.0.1"] {
            assert_eq!(first_loopback(without), None, "{without}");
        }
    }

    #[test]
    fn questions_reach_the_server_and_answers_their_askers() {
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let server = datagrams.local_addr().unwrap();
        let streams = TcpListener::bind(server).unwrap();
        thread::spawn(move || {
            let mut room = [0; 16];
            // The second question is answered first.
            let asked = [(); 2].map(|()| datagrams.recv_from(&mut room).unwrap().1);
            for (to, text) in asked.iter().zip(["1", "2"]).rev() {
                datagrams.send_to(text.as_bytes(), to).unwrap();
            }
            let (mut stream, _) = streams.accept().unwrap();
            stream.read_exact(&mut room[..3]).unwrap();
            stream.write_all(&[0, 1, room[2] + 1]).unwrap();
        });
        let (guest, host) = UnixStream::pair().unwrap();
        let served = thread::spawn(move || serve(&host, server).map_err(|error| error.kind()));
        let send = |number, is_stream, message: &[u8]| {
            wire::send(&guest, &DnsMessage { number, is_stream, message }).unwrap();
        };
        let mut room = Vec::new();
        let mut receive = || {
            wire::receive(&guest, &mut room).unwrap().unwrap();
            let answer: DnsMessage<'_> = wire::read(&room).unwrap();
            (answer.number, answer.message.to_vec())
        };
        send(7, false, b"first");
        thread::sleep(Duration::from_millis(200));
        send(8, false, b"second");
        let mut answers = [receive(), receive()];
        answers.sort();
        assert_eq!(answers, [(7, b"1".to_vec()), (8, b"2".to_vec())]);
        send(9, true, b"a");
        assert_eq!(receive(), (9, b"b".to_vec()));
        send(10, false, &vec![0; MAX_DNS_MESSAGE + 1]);
        assert_eq!(served.join().unwrap(), Err(io::ErrorKind::InvalidData));
    }
}
