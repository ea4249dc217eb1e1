use std::fmt::Display;

use aws_lc_rs::{digest, hmac};
use base64::Engine;
use base64::alphabet::STANDARD as ALPHABET;
use base64::engine::general_purpose::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use pillarbox::{Error, ErrorKind, Result};

use crate::Secret;

/// The shortest key of a secret, in bytes.
const SECRET_BYTES_MIN: usize = 24;
/// The longest key of a secret, in bytes.
const SECRET_BYTES_MAX: usize = 64;

const PREFIX: &str = "whsec_";
/// The prefix of secrets that sign with a key pair.
const PREFIX_ASYMMETRIC: &str = "whsk_";

/// Some tools leave the padding away.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &ALPHABET,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Signs requests as Standard Webhooks do, once with each secret.
pub(super) struct Signer {
    keys: Vec<hmac::Key>,
}

impl Signer {
    pub(super) fn new(secrets: &[Secret]) -> Result<Self> {
        let key = |(index, secret): (usize, &Secret)| {
            Ok(hmac::Key::new(hmac::HMAC_SHA256, &key_of(secret, index + 1, secrets.len())?))
        };
        Ok(Signer { keys: secrets.iter().enumerate().map(key).collect::<Result<_>>()? })
    }

    /// The value of `webhook-signature`; None without a secret.
    pub(super) fn sign(&self, id: &str, timestamp: &str, body: &[u8]) -> Option<String> {
        let signature = |key: &hmac::Key| {
            let mut context = hmac::Context::with_key(key);
            for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
                context.update(part);
            }
            format!("v1,{}", STANDARD.encode(context.sign()))
        };
        let signatures: Vec<String> = self.keys.iter().map(signature).collect();
        (!signatures.is_empty()).then(|| signatures.join(" "))
    }
}

/// The `webhook-id` of a request with several events: the same for the same events in the same order.
pub(super) fn batch_id(ids: impl IntoIterator<Item = impl Display>) -> String {
    const HEX_DIGITS: usize = 32;
    let mut context = digest::Context::new(&digest::SHA256);
    for id in ids {
        context.update(format!("{id}\n").as_bytes());
    }
    let hex: String = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("batch_{}", &hex[..HEX_DIGITS])
}

/// Whether this secret, of so many the one with this number, can sign.
pub(super) fn check(secret: &Secret, number: usize, count: usize) -> Result<()> {
    key_of(secret, number, count).map(drop)
}

fn key_of(secret: &Secret, number: usize, count: usize) -> Result<Vec<u8>> {
    key(secret.expose())
        .map_err(|why| Error::new(ErrorKind::Invalid, format!("secret {number} of {count} of an http sink {why}")))
}

fn key(secret: &str) -> std::result::Result<Vec<u8>, String> {
    if secret.starts_with(PREFIX_ASYMMETRIC) {
        return Err(format!(
            "is for signing with a key pair, which is not supported; give one that begins with {PREFIX}"
        ));
    }
    let text = secret.strip_prefix(PREFIX).unwrap_or(secret);
    let hint = "make one with `echo whsec_$(openssl rand -base64 32)`";
    let key = LENIENT.decode(text).map_err(|_| format!("is not {PREFIX} followed by base64; {hint}"))?;
    if !(SECRET_BYTES_MIN..=SECRET_BYTES_MAX).contains(&key.len()) {
        let length = key.len();
        return Err(format!("has {length} bytes; it must have {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}; {hint}"));
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn sign(secrets: &[&str]) -> Option<String> {
        let secrets: Vec<Secret> = secrets.iter().map(|secret| Secret::new(*secret)).collect();
        Signer::new(&secrets).unwrap().sign(ID, "1614265330", BODY)
    }

    #[test]
    fn signs_as_the_libraries_of_standard_webhooks_do() {
        assert_eq!(sign(&[SECRET]).as_deref(), Some(SIGNATURE));
        assert_eq!(sign(&[&SECRET["whsec_".len()..]]).as_deref(), Some(SIGNATURE), "the plain form");
        assert_eq!(sign(&[]), None);
    }

    #[test]
    fn each_secret_makes_one_signature() {
        let other = format!("whsec_{}", STANDARD.encode([7; 32]));
        let both = sign(&[&other, SECRET]).unwrap();
        assert_eq!(both, format!("{} {SIGNATURE}", sign(&[&other]).unwrap()));
    }

    #[test]
    fn what_is_signed_matters() {
        let signer = Signer::new(&[Secret::new(SECRET)]).unwrap();
        for (id, timestamp, body) in
            [("msg_other", "1614265330", BODY), (ID, "1614265331", BODY), (ID, "1614265330", b"{}")]
        {
            assert_ne!(signer.sign(id, timestamp, body).as_deref(), Some(SIGNATURE));
        }
    }

    #[test]
    fn a_secret_has_24_to_64_bytes() {
        let of = |length: usize| Signer::new(&[Secret::new(format!("whsec_{}", STANDARD.encode(vec![1; length])))]);
        assert!(of(SECRET_BYTES_MIN).is_ok() && of(SECRET_BYTES_MAX).is_ok());
        assert!(of(SECRET_BYTES_MIN - 1).is_err() && of(SECRET_BYTES_MAX + 1).is_err());
        let unpadded = STANDARD.encode([1; 32]).trim_end_matches('=').to_owned();
        assert!(Signer::new(&[Secret::new(unpadded)]).is_ok());
    }

    #[test]
    fn a_wrong_secret_is_named_by_its_place_and_never_shown() {
        for wrong in ["whsec_canary!", "canary", "whsk_canary", "", "whsec_Y2FuYXJ5"] {
            let error = Signer::new(&[Secret::new(SECRET), Secret::new(wrong)]).err().unwrap().to_string();
            assert!(error.contains("secret 2 of 2"), "{error}");
            assert!(!error.contains("canary") && !error.contains("Y2FuYXJ5"), "{error}");
        }
    }

    #[test]
    fn the_id_of_a_batch_is_made_of_the_ids_in_order() {
        let ids = [Uuid::from_u128(1), Uuid::from_u128(2)];
        let id = batch_id(ids);
        // printf '%s\n' 00000000-0000-0000-0000-000000000001 00000000-0000-0000-0000-000000000002 | sha256sum
        assert_eq!(id, "batch_a929eae1f77de69cc99f751f774e5d3b");
        assert_ne!(batch_id([ids[1], ids[0]]), id);
    }
}
