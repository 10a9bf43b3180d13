//! By serde: the 20 bytes in binary formats, so that they are the same on every wire; three fields where people read.

use super::RemoteSlice;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(rename = "RemoteSlice")]
struct Fields {
    addr: u64,
    len: u64,
    rkey: u32,
}

impl Serialize for RemoteSlice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let RemoteSlice { addr, len, rkey } = *self;
        if serializer.is_human_readable() {
            Fields { addr, len, rkey }.serialize(serializer)
        } else {
            self.to_bytes().serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for RemoteSlice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RemoteSlice, D::Error> {
        if deserializer.is_human_readable() {
            let Fields { addr, len, rkey } = Fields::deserialize(deserializer)?;
            Ok(RemoteSlice { addr, len, rkey })
        } else {
            Ok(RemoteSlice::from_bytes(<[u8; RemoteSlice::BYTES]>::deserialize(deserializer)?))
        }
    }
}
