//! What travels besides the values: requests of 64 bytes, and answers to uploads of 8.

/// How many requests a client keeps in flight.
pub const DEPTH: usize = 16;

/// A request, as the client sends it.
pub enum Request {
    /// Send the value of this key.
    Get { key: String },
    /// The value of this key, of this length and hash, was put into the given upload buffer; answer with the hash of what
    /// is there.
    Put { key: String, upload: usize, len: usize, hash: u64 },
}

impl Request {
    /// The length of the form that travels.
    pub const LEN: usize = 64;

    /// Writes the form that travels: kind, upload buffer, length of the key, length, hash, key.
    pub fn write(&self, row: &mut [u8; Self::LEN]) {
        let (kind, key, upload, len, hash) = match self {
            Request::Get { key } => (b'G', key, 0, 0, 0),
            Request::Put { key, upload, len, hash } => (b'P', key, *upload, *len, *hash),
        };
        row[0] = kind;
        row[1] = upload as u8;
        row[2] = key.len() as u8;
        row[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        row[8..16].copy_from_slice(&hash.to_le_bytes());
        row[16..16 + key.len()].copy_from_slice(key.as_bytes());
    }

    /// Reads the form that travels; `None` if it is none. Nothing in it is trusted: it came from a peer.
    pub fn read(row: &[u8]) -> Option<Request> {
        let (head, text) = row.split_first_chunk::<16>()?;
        let key = str::from_utf8(text.get(..head[2].into())?).ok()?.to_owned();
        match head[0] {
            b'G' => Some(Request::Get { key }),
            b'P' => Some(Request::Put {
                key,
                upload: head[1].into(),
                len: u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize,
                hash: u64::from_le_bytes(*head.last_chunk()?),
            }),
            _ => None,
        }
    }
}

/// The length of an answer to an upload: the hash of what arrived, little endian.
pub const ANSWER_LEN: usize = 8;
