//! Certificates, made by openssl, and servers that show them.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::server::{Kind, Server};

/// A certificate authority and a certificate for `redis.test` that it has signed, in that directory.
pub fn certificates(directory: &Path, name: &str) -> [PathBuf; 3] {
    let at = |file: &str| directory.join(format!("{name}-{file}.pem"));
    let [authority_key, authority, key, request, certificate, names] =
        ["authority-key", "authority", "key", "request", "certificate", "names"].map(at);
    std::fs::write(&names, "subjectAltName=DNS:redis.test\n").unwrap();
    let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let openssl = |arguments: &[&str], files: &[(&str, &Path)]| {
        let mut command = Command::new("openssl");
        command.args(arguments);
        for (option, file) in files {
            command.arg(option).arg(file);
        }
        let output = command.output().expect("openssl runs");
        assert!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    };
    let self_signed = [&["req", "-x509", "-days", "2", "-subj", "/CN=authority"], &new_key[..]].concat();
    openssl(&self_signed, &[("-keyout", &authority_key), ("-out", &authority)]);
    let requested = [&["req", "-subj", "/CN=redis.test"], &new_key[..]].concat();
    openssl(&requested, &[("-keyout", &key), ("-out", &request)]);
    openssl(
        &["x509", "-req", "-days", "2"],
        &[
            ("-in", &request),
            ("-CA", &authority),
            ("-CAkey", &authority_key),
            ("-extfile", &names),
            ("-out", &certificate),
        ],
    );
    [authority, certificate, key]
}

/// A server that speaks TLS on that port, and asks its clients for certificates or not.
pub fn tls_server(port: u16, [authority, certificate, key]: [&Path; 3], asks: &str, more: &[&str]) -> Server {
    let [authority, certificate, key] = [authority, certificate, key].map(|path| path.to_str().unwrap());
    let port = port.to_string();
    let files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", authority];
    Server::start(Kind::Redis, &[&["--tls-port", &port, "--tls-auth-clients", asks], &files[..], more].concat())
}
