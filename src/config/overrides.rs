//! Other limits for some callers: the field `overrides` of a rule.

use std::rc::Rc;

use super::reader::{Node, Object};
use super::{all, read_limits, read_networks};
use crate::client_ip::ClientIp;
use crate::identity::Identity;
use crate::overrides::{Allowance, Overrides};

/// Reads the field of a rule whose key is this.
pub fn read(rule: &Object<'_>, identity: &Identity, client_ip: &ClientIp) -> Option<Overrides> {
    let Some(node) = rule.get("overrides") else { return Some(Overrides::default()) };
    let entries = node.list("overrides")?;
    let entries = all(entries.into_iter().map(|node| read_override(node, identity, client_ip)))?;
    let mut overrides = Overrides::default();
    for (identities, networks, allowance) in entries {
        overrides.add(identities, networks, allowance);
    }
    Some(overrides)
}

type Override = (Vec<String>, Vec<ipnet::IpNet>, Allowance);

fn read_override(node: Node<'_>, identity: &Identity, client_ip: &ClientIp) -> Option<Override> {
    let object = node.object(&["values", "cidrs", "limits", "unlimited"])?;
    let values = object.get("values").map(|node| {
        let values = node.list("values of the key")?;
        if values.is_empty() {
            node.expected("at least one value");
        }
        all(values.into_iter().map(|node| read_value(&node, identity, client_ip)))
    });
    let networks = object.get("cidrs").map(|node| read_networks(&node));
    let callers = match (values, networks) {
        (Some(values), None) => values.map(|values| (values, Vec::new())),
        (None, Some(networks)) => networks.map(|networks| (Vec::new(), networks)),
        _ => {
            object.fault("expected either values or cidrs, which say whom the override is for".to_owned());
            None
        }
    };
    let limits = object.get("limits").map(|node| read_limits(&node).map(|limits| Allowance::Limits(Rc::from(limits))));
    let unlimited = object.get("unlimited").map(|node| match node.boolean() {
        Some(false) => {
            node.expected("true, or limits in its place");
            None
        }
        other => other.map(|_| Allowance::Unlimited),
    });
    let allowance = match (limits, unlimited) {
        (Some(allowance), None) | (None, Some(allowance)) => allowance,
        _ => {
            object.fault("expected either limits or unlimited".to_owned());
            None
        }
    };
    let ((values, networks), allowance) = (callers?, allowance?);
    Some((values, networks, allowance))
}

/// One value of the key: a text where the key has one part, a list of texts where it has several.
fn read_value(node: &Node<'_>, identity: &Identity, client_ip: &ClientIp) -> Option<String> {
    let parts = identity.parts.len();
    let what = if parts == 1 {
        "a value of the key's part".to_owned()
    } else {
        format!("a list of {parts} values, one for each part of the key")
    };
    let values = if node.is_list() {
        all(node.list("values")?.into_iter().map(|node| node.text("a text")))?
    } else {
        vec![node.text(&what)?]
    };
    let named = identity.of_values(&values, client_ip);
    if named.is_none() {
        node.expected(&what);
    }
    named
}
