//! Certificates for tests.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tssd_store::Credentials;

/// A certificate authority. Its certificates are in a temporary directory.
pub struct CertificateAuthority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl CertificateAuthority {
    /// Creates an authority with a new key.
    ///
    /// # Panics
    ///
    /// If the directory cannot be created.
    #[expect(clippy::new_without_default, reason = "each is another")]
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        std::fs::write(folder.path().join("ca.pem"), params.self_signed(&key).unwrap().pem())
            .unwrap();
        Self { issuer: Issuer::new(params, key), folder }
    }

    /// Issues a certificate for a host name, into the files `file.pem` and `file.key`.
    ///
    /// `change` adjusts the parameters of the certificate before it is signed.
    ///
    /// # Panics
    ///
    /// If the name is invalid.
    pub fn issue(
        &self,
        file: &str,
        name: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Credentials {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let path = |extension: &str| self.folder.path().join(format!("{file}.{extension}"));
        std::fs::write(path("pem"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        Credentials { ca: self.folder.path().join("ca.pem"), cert: path("pem"), key: path("key") }
    }
}
