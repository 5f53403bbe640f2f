//! Whose address is the client's: the field `client_ip`; and networks, wherever they are named.

use std::num::NonZeroUsize;

use ipnet::IpNet;

use super::reader::Node;
use super::shape::{Among, Field, List, Object, Shape, Words};
use crate::client_ip::{ClientIp, Prefixes, Trust};

/// The field.
pub const SHAPE: Shape = Shape::Object(Object {
    fields: &[
        Field::new(
            "trusted_hops",
            Shape::Integer(1, 1000),
            "Envoy's `source.address`",
            "the Nth entry of x-forwarded-for from the right counts, over all its lines; where there is none, or it is no \
             address, Envoy's `source.address`",
        ),
        Field::new(
            "trusted_proxies",
            NETWORKS,
            "Envoy's `source.address`",
            "the right-most entry of x-forwarded-for that is in none of these networks counts; where there is none, or \
             it is no address, Envoy's `source.address`",
        ),
        Field::new("ipv4_prefix", Shape::Integer(1, 32), "32", "IPv4 addresses in a network of so many bits are one"),
        Field::new("ipv6_prefix", Shape::Integer(1, 128), "64", "likewise for IPv6"),
    ],
    among: &[Among {
        names: &["trusted_hops", "trusted_proxies"],
        count: (0, 1),
        otherwise: "both trusted_hops and trusted_proxies, expected one of them",
    }],
});

/// Addresses and networks.
pub const NETWORKS: Shape = Shape::List(List {
    of: "addresses and networks, such as \"10.0.0.0/8\"",
    element: &Shape::Text(Words::matching(
        "an address or a network, such as \"10.0.0.0/8\"",
        "^[0-9A-Fa-f:.]+(/[0-9]{1,3})?$",
    )),
    count: (1, usize::MAX),
    otherwise: "at least one address or network, or no such field",
});

/// Reads the field.
pub fn read(node: Node<'_>) -> Option<ClientIp> {
    let object = node.object()?;
    let default = Prefixes::default();
    let ipv4 = object.or("ipv4_prefix", default.ipv4, |node| node.integer());
    let ipv6 = object.or("ipv6_prefix", default.ipv6, |node| node.integer());
    let hops = object.given("trusted_hops", |node| node.integer().and_then(NonZeroUsize::new).map(Trust::Hops));
    let networks = object.given("trusted_proxies", |node| networks(&node).map(Trust::Networks));
    Some(ClientIp { trust: hops?.or(networks?).unwrap_or_default(), prefixes: Prefixes { ipv4: ipv4?, ipv6: ipv6? } })
}

/// Reads a list of networks.
pub fn networks(node: &Node<'_>) -> Option<Vec<IpNet>> {
    node.list_of(|node| node.parsed(Trust::network))
}
