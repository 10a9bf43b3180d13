//! How the two processes find each other: a Unix socket in the abstract namespace, whose name the server gives the client as
//! an argument. Over it go the addresses of queue pairs, the keys of upload buffers, and the figures at the end.

use crate::Result;
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// How long one side waits for the other before it gives up.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The other process.
pub struct Peer {
    /// The stream over which the two agree on everything else.
    pub control: UnixStream,
    side: Side,
}

enum Side {
    Server(UnixListener),
    Client(SocketAddr),
}

impl Peer {
    /// The server's end: binds `name`, starts the client, and waits for it.
    pub fn serve(name: &str, client: &mut Command) -> Result<(Peer, Child)> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        listener.set_nonblocking(true)?;
        let mut client = client.spawn()?;
        let control = accept(&listener, || Ok(client.try_wait()?.is_some()))?;
        Ok((Peer { control, side: Side::Server(listener) }, client))
    }

    /// The client's end.
    pub fn join(name: &str) -> Result<Peer> {
        let address = SocketAddr::from_abstract_name(name)?;
        let control = UnixStream::connect_addr(&address)?;
        control.set_read_timeout(Some(PATIENCE))?;
        Ok(Peer { control, side: Side::Client(address) })
    }

    /// Whether this is the server.
    pub fn is_server(&self) -> bool {
        matches!(self.side, Side::Server(_))
    }

    /// One more stream between the two; both must ask for it.
    pub fn stream(&self) -> Result<UnixStream> {
        match &self.side {
            Side::Server(listener) => accept(listener, || Ok(false)),
            Side::Client(address) => Ok(UnixStream::connect_addr(address)?),
        }
    }

    /// Tells the peer some numbers.
    pub fn tell(&mut self, numbers: &[u64]) -> Result<()> {
        tell(&mut self.control, numbers)
    }

    /// Hears as many numbers as the peer told.
    pub fn hear<const N: usize>(&mut self) -> Result<[u64; N]> {
        hear(&mut self.control)
    }

    /// Waits until the peer is here too.
    pub fn meet(&mut self) -> Result<()> {
        const HERE: u64 = 0x6865_7265;
        self.tell(&[HERE])?;
        if self.hear()? == [HERE] { Ok(()) } else { Err("the two processes are out of step".into()) }
    }
}

/// [`Peer::tell`], when only the stream is left.
pub fn tell(control: &mut UnixStream, numbers: &[u64]) -> Result<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    control.write_all(&bytes).map_err(gone)
}

/// [`Peer::hear`], when only the stream is left.
pub fn hear<const N: usize>(control: &mut UnixStream) -> Result<[u64; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 8];
        control.read_exact(&mut bytes).map_err(gone)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}

fn gone(error: std::io::Error) -> Box<dyn std::error::Error + Send + Sync> {
    format!("the other process is gone, or silent ({error})").into()
}

/// Accepts, unless nobody comes.
fn accept(listener: &UnixListener, mut is_gone: impl FnMut() -> Result<bool>) -> Result<UnixStream> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                return Ok(stream);
            }
            Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
            Err(_) if is_gone()? => return Err("the client has ended before it came".into()),
            Err(_) if Instant::now() >= deadline => return Err("the client does not come".into()),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
