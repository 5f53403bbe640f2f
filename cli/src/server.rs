//! Redis or Valkey as the command line reaches it: one server or a cluster, by TLS or not.
//!
//! Invariant: no password is in an error.

use std::time::Duration;

use redis::cluster::{ClusterClientBuilder, ClusterConnection};
use redis::{Client, Cmd, Connection, ConnectionInfo, FromRedisValue, IntoConnectionInfo, TlsCertificates};

use crate::arguments::Caller;

/// How long anything may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A connection.
pub enum Server {
    /// To one server.
    One(Box<Connection>),
    /// To the nodes of a cluster.
    Cluster(Box<ClusterConnection>),
}

impl Server {
    /// Connects to where the command line says.
    pub fn connect(caller: &Caller) -> Result<Self, String> {
        let failed = |error: redis::RedisError| format!("Redis: {error}");
        // Rustls wants to be told which of its implementations counts.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let info = info(caller)?;
        let certificates = certificates(caller)?;
        if caller.cluster {
            let builder = ClusterClientBuilder::new([info]).connection_timeout(TIMEOUT).response_timeout(TIMEOUT);
            let builder = certificates.into_iter().fold(builder, ClusterClientBuilder::certs);
            let connection = builder.build().and_then(|client| client.get_connection()).map_err(failed)?;
            return Ok(Self::Cluster(Box::new(connection)));
        }
        let client = match certificates {
            Some(certificates) => Client::build_with_tls(info, certificates),
            None => Client::open(info),
        };
        let connection = client.and_then(|client| client.get_connection_with_timeout(TIMEOUT)).map_err(failed)?;
        connection.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
        Ok(Self::One(Box::new(connection)))
    }

    /// Carries out a command.
    pub fn query<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T, String> {
        let answer = match self {
            Self::One(connection) => command.query(connection),
            Self::Cluster(connection) => command.query(connection),
        };
        answer.map_err(|error| format!("Redis: {error}"))
    }
}

fn info(caller: &Caller) -> Result<ConnectionInfo, String> {
    let wrong = "--redis: expected redis://HOST:PORT/DATABASE, or rediss:// for TLS";
    let info = caller.redis.as_str().into_connection_info().map_err(|_| wrong.to_owned())?;
    let settings = info.redis_settings();
    if settings.password().is_some() {
        eprintln!(
            "meshquota: warning: a password in a URL is seen by everybody on this machine; use --password-file or MESHQUOTA_REDIS_PASSWORD"
        );
    }
    let password = match &caller.password_file {
        Some(file) => {
            let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
            Some(text.lines().next().unwrap_or_default().to_owned())
        }
        None => caller.password.clone(),
    };
    let Some(password) = password else { return Ok(info) };
    let settings = settings.clone().set_password(password);
    Ok(info.set_redis_settings(settings))
}

fn certificates(caller: &Caller) -> Result<Option<TlsCertificates>, String> {
    let Some(file) = &caller.ca else { return Ok(None) };
    let root_cert = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(Some(TlsCertificates { client_tls: None, root_cert: Some(root_cert) }))
}
