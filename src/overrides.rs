//! Other limits for some callers: by who they are, or by the network that they come from.
//!
//! There may be tens of thousands of them, so none is looked at that does not fit: an identity is looked up in a table,
//! an address once in a table for each length of prefix that occurs (33 for IPv4 at most, 129 for IPv6). A trie would do
//! the same in as many steps, with more code.
//!
//! Invariant: of all the overrides that fit a request, the first in the order of the configuration counts.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::rc::Rc;

use ipnet::IpNet;

use crate::quota::Limit;

/// What a caller may take in place of the rule's limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allowance {
    /// These limits, of which there is at least one.
    Limits(Rc<[Limit]>),
    /// Whatever they like: the rule is not for them.
    Unlimited,
}

/// The overrides of one rule.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    allowances: Vec<Allowance>,
    /// The first override of an identity, by its place among the allowances.
    identities: HashMap<String, usize>,
    /// The first override of a network, by the length of its prefix; the networks of each version apart.
    networks: BTreeMap<(bool, u8), HashMap<IpNet, usize>>,
}

impl Overrides {
    /// Adds an override for these identities and these networks, after those that are there. Returns for how many of
    /// them it counts: what is named already, or is part of a network that is, is found there first.
    pub fn add(
        &mut self,
        identities: impl IntoIterator<Item = String>,
        networks: impl IntoIterator<Item = IpNet>,
        allowance: Allowance,
    ) -> usize {
        let mut counts = 0;
        let place = self.allowances.len();
        self.allowances.push(allowance);
        for identity in identities {
            counts += usize::from(*self.identities.entry(identity).or_insert(place) == place);
        }
        for network in networks {
            let network = network.trunc();
            let is_found_before = self.network(network.addr(), network.prefix_len()).is_some_and(|first| first < place);
            counts += usize::from(!is_found_before);
            let of_length = self.networks.entry(kind(&network)).or_default();
            of_length.entry(network).or_insert(place);
        }
        counts
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.allowances.is_empty()
    }

    /// The networks that have an override.
    pub fn networks(&self) -> impl Iterator<Item = &IpNet> {
        self.networks.values().flat_map(HashMap::keys)
    }

    /// The most limits that one of them gives.
    pub fn most_limits(&self) -> usize {
        let limits = self.allowances.iter().map(|allowance| match allowance {
            Allowance::Limits(limits) => limits.len(),
            Allowance::Unlimited => 0,
        });
        limits.max().unwrap_or(0)
    }

    /// What a caller of this identity and address may take, where that is not what the rule says. The address is asked
    /// for only where it counts.
    pub fn find(&self, identity: &str, address: impl FnOnce() -> Option<IpAddr>) -> Option<&Allowance> {
        let by_identity = self.identities.get(identity).copied();
        let by_network =
            if self.networks.is_empty() { None } else { address().and_then(|address| self.network(address, u8::MAX)) };
        let place = by_identity.into_iter().chain(by_network).min()?;
        self.allowances.get(place)
    }

    /// The first override of a network that this address is in, among prefixes up to this length.
    fn network(&self, address: IpAddr, longest: u8) -> Option<usize> {
        let lengths = self.networks.range((address.is_ipv6(), 0)..=(address.is_ipv6(), longest));
        let places = lengths.filter_map(|((_, length), networks)| {
            let network = IpNet::new(address, *length).ok()?.trunc();
            networks.get(&network).copied()
        });
        places.min()
    }
}

fn kind(network: &IpNet) -> (bool, u8) {
    (matches!(network, IpNet::V6(_)), network.prefix_len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_ip::Trust;
    use crate::quota::{Capacity, Refill};

    fn limits(capacity: u64) -> Allowance {
        let limit = Limit::new(Capacity::new(capacity).unwrap(), Refill::new(1, 1000).unwrap()).unwrap();
        Allowance::Limits(Rc::from([limit]))
    }

    fn network(text: &str) -> IpNet {
        Trust::network(text).unwrap()
    }

    #[test]
    fn the_first_override_that_fits_counts() {
        let mut overrides = Overrides::default();
        overrides.add(["gold".to_owned()], [], limits(100));
        overrides.add([], [network("10.0.0.0/8"), network("2001:db8::/32")], Allowance::Unlimited);
        overrides.add(
            ["gold".to_owned(), "silver".to_owned()],
            [network("10.1.0.0/16"), network("0.0.0.0/0")],
            limits(20),
        );
        let find = |identity, address: &str| overrides.find(identity, || address.parse().ok()).cloned();
        assert_eq!(find("gold", "10.1.2.3"), Some(limits(100)));
        assert_eq!(find("silver", "10.1.2.3"), Some(Allowance::Unlimited));
        assert_eq!(find("silver", "192.0.2.1"), Some(limits(20)));
        assert_eq!(find("", "192.0.2.1"), Some(limits(20)));
        assert_eq!(find("", "2001:db8:1::1"), Some(Allowance::Unlimited));
        assert_eq!(find("", "2001:db9::1"), None);
        assert_eq!(find("", "no address"), None);
        assert_eq!(find("silver", "no address"), Some(limits(20)));
    }

    #[test]
    fn an_address_is_asked_for_only_where_networks_are_named() {
        let mut overrides = Overrides::default();
        overrides.add(["gold".to_owned()], [], Allowance::Unlimited);
        let asked = || panic!("nobody needs the address");
        assert_eq!(overrides.find("gold", asked), Some(&Allowance::Unlimited));
        assert_eq!(overrides.find("silver", || panic!("nobody needs the address")), None);
    }

    proptest::proptest! {
        #[test]
        fn the_tables_find_what_a_look_at_each_would(
            networks in proptest::collection::vec((proptest::num::u32::ANY, 0..=32_u8), 0..40), address: u32) {
            let mut overrides = Overrides::default();
            let mut list = Vec::new();
            for (place, (bits, length)) in networks.iter().enumerate() {
                // Addresses close to the one that is looked for, so that many fit.
                let near = address ^ bits.checked_shr(u32::from(*length)).unwrap_or(0);
                let network = IpNet::new(IpAddr::V4(near.into()), *length).unwrap();
                overrides.add([], [network], limits(place as u64 + 1));
                list.push(network);
            }
            let address = IpAddr::V4(address.into());
            let expected = list.iter().position(|network| network.contains(&address)).map(|place| limits(place as u64 + 1));
            proptest::prop_assert_eq!(overrides.find("", || Some(address)).cloned(), expected);
        }
    }
}
