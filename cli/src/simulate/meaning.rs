//! What the fields of a log say: Envoy's command operators, and the names that fields of JSON usually have.

use super::entry::{Field, Says};
use super::time::Form;

impl Field {
    /// What a command operator says, without its percent signs: its name, and its arguments in parentheses.
    ///
    /// # Errors
    /// That times are not understood as it writes them.
    pub fn of_operator(name: &str, arguments: &str) -> Result<Self, String> {
        let property = |path: &str| Says::Property(path.into());
        Ok(Self::named(match name {
            // With a length, only a network is left of an address.
            _ if name.ends_with("_ADDRESS_WITHOUT_PORT") && !arguments.is_empty() => Says::Nothing,
            "START_TIME" => Says::Time(Form::new(arguments)?),
            "REQ" | "REQUEST_HEADER" | "REQ_WITHOUT_QUERY" => {
                // `A?B` is B where there is no A. What a rule sees is the path before it was rewritten.
                let name = match arguments.split_once('?') {
                    Some((_, second)) if second.starts_with(':') => second,
                    Some((first, _)) => first,
                    None => arguments,
                };
                Says::Header(name.to_ascii_lowercase().into())
            }
            "PATH" => Says::Header(":path".into()),
            "DOWNSTREAM_REMOTE_ADDRESS" | "DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT" => property("source.address"),
            "DOWNSTREAM_DIRECT_REMOTE_ADDRESS" | "DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT" => Says::Peer,
            "DOWNSTREAM_LOCAL_ADDRESS" => property("destination.address"),
            "DOWNSTREAM_PEER_URI_SAN" => property("connection.uri_san_peer_certificate"),
            "DOWNSTREAM_PEER_SUBJECT" => property("connection.subject_peer_certificate"),
            "REQUESTED_SERVER_NAME" => property("connection.requested_server_name"),
            "PROTOCOL" => property("request.protocol"),
            "ROUTE_NAME" => property("xds.route_name"),
            "UPSTREAM_CLUSTER" | "UPSTREAM_CLUSTER_RAW" => property("xds.cluster_name"),
            _ => Says::Nothing,
        }))
    }

    /// What is meant by a name in a log in JSON. Names are free there; these are the usual ones, and any other is taken for
    /// that of a header.
    pub fn of_name(name: &str) -> Self {
        let name = name.to_ascii_lowercase().replace('_', "-");
        let header = |name: &str, rank| Self::guessed(Says::Header(name.into()), rank);
        let property = |path: &str, rank| Self::guessed(Says::Property(path.into()), rank);
        // A log may have several names of one thing, as its own time beside that at which a collector found it. What a rule
        // sees is the path before it was rewritten.
        match name.as_str() {
            "start-time" => Self::guessed(Says::Time(Form::Usual), 1),
            "timestamp" => Self::guessed(Says::Time(Form::Usual), 2),
            "@timestamp" | "time" => Self::guessed(Says::Time(Form::Usual), 3),
            "method" => header(":method", 1),
            "request-method" => header(":method", 2),
            "x-envoy-origin-path" | "x-envoy-original-path" => header(":path", 1),
            "path" => header(":path", 2),
            "request-path" => header(":path", 3),
            "authority" => header(":authority", 1),
            "request-authority" => header(":authority", 2),
            "host" => header(":authority", 3),
            "request-id" => header("x-request-id", 2),
            "downstream-remote-address" => property("source.address", 1),
            "client-ip" => property("source.address", 2),
            "remote-address" => property("source.address", 3),
            "downstream-direct-remote-address" => Self::guessed(Says::Peer, 1),
            "downstream-peer-uri-san" => property("connection.uri_san_peer_certificate", 1),
            "requested-server-name" => property("connection.requested_server_name", 1),
            "route-name" => property("xds.route_name", 1),
            "upstream-cluster" => property("xds.cluster_name", 1),
            "protocol" => property("request.protocol", 1),
            // What the answer had is nothing that the request asked.
            other if other.starts_with("response") || other.starts_with("resp-") => Self::guessed(Says::Nothing, 1),
            other => header(other, 1),
        }
    }
}

/// Reads an operator at the start of a text after its first percent sign. What follows its last one is returned with it.
///
/// # Errors
/// That there is none, or what is wrong with it.
pub fn operator(text: &str) -> Result<(Field, &str), String> {
    let none = || format!("no command operator of Envoy begins at %{text}");
    let end = text.find(|byte: char| !(byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == '_'));
    let (name, rest) = text.split_at_checked(end.ok_or_else(none)?).ok_or_else(none)?;
    let (arguments, rest) = match rest.strip_prefix('(') {
        Some(rest) => rest.split_once(')').ok_or_else(none)?,
        None => ("", rest),
    };
    // A length at which the value is cut.
    let rest = match rest.strip_prefix(':') {
        Some(rest) => rest.trim_start_matches(|byte: char| byte.is_ascii_digit()),
        None => rest,
    };
    let rest = rest.strip_prefix('%').filter(|_| !name.is_empty()).ok_or_else(none)?;
    Ok((Field::of_operator(name, arguments)?, rest))
}
