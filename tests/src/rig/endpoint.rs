//! What two queues tell each other to become connected, and how it travels.

use std::io::{Error, ErrorKind, Read, Result, Write};

/// Where a queue is reached: what the peer must know to connect to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// The number of the queue pair.
    pub qpn: u32,
    /// The first packet sequence number, 24 bits.
    pub psn: u32,
    /// The address of the port.
    pub gid: [u8; 16],
    /// The local identifier of the port; 0 on Ethernet.
    pub lid: u16,
    /// The path MTU of the port, as the number of `ibv_mtu`.
    pub mtu: u8,
}

impl Endpoint {
    /// The length of the form that travels.
    pub const LEN: usize = 32;
    const MAGIC: [u8; 5] = *b"rig-1";

    /// The form that travels: big endian, with a mark by which the peer knows it.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..5].copy_from_slice(&Self::MAGIC);
        bytes[5] = self.mtu;
        bytes[6..8].copy_from_slice(&self.lid.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.qpn.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.psn.to_be_bytes());
        bytes[16..].copy_from_slice(&self.gid);
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; `None` if it is something else.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Option<Endpoint> {
        let four = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let gid = *bytes.last_chunk::<16>()?;
        let lid = u16::from_be_bytes([bytes[6], bytes[7]]);
        (bytes[..5] == Self::MAGIC).then(|| Endpoint { qpn: four(8), psn: four(12), gid, lid, mtu: bytes[5] })
    }
}

/// Tells the peer at the other end of a byte stream one's own endpoint, and reads the peer's.
///
/// # Errors
///
/// The stream's; `InvalidData` if what came is no endpoint.
pub fn exchange(stream: &mut (impl Read + Write), mine: Endpoint) -> Result<Endpoint> {
    stream.write_all(&mine.to_bytes())?;
    stream.flush()?;
    let mut bytes = [0; Endpoint::LEN];
    stream.read_exact(&mut bytes)?;
    Endpoint::from_bytes(&bytes).ok_or_else(|| Error::new(ErrorKind::InvalidData, "the peer sent no endpoint"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_survives_the_wire() {
        let endpoint =
            Endpoint { qpn: 0x123456, psn: 0xabcdef, gid: std::array::from_fn(|i| i as u8), lid: 0x1234, mtu: 5 };
        assert_eq!(Endpoint::from_bytes(&endpoint.to_bytes()), Some(endpoint));
        assert_eq!(Endpoint::from_bytes(&[0; Endpoint::LEN]), None);
    }
}
