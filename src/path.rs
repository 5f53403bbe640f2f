//! The normal form of a path: one text for all the ways in which the same resource can be written.
//!
//! A rule for `/login` that `//login`, `/./login`, `/%6Cogin` or `/login?x=1` would pass by limits nobody. So paths are
//! compared, and put into keys, in this form only:
//!
//! * what follows `?` or `#` is no part of the path;
//! * `%XX` is decoded, once, where it stands for a letter, a digit or one of `-._~`, which mean the same either way
//!   (RFC 3986, section 6.2.2.2); elsewhere it stays, with capital digits;
//! * a byte that a path may not hold as it is becomes `%XX`;
//! * `.` and `..` are resolved (RFC 3986, section 5.2.4), and several slashes are one.
//!
//! Invariant: the form is printable ASCII, begins with a slash unless the path does not, is at most three times as long
//! as the path, and is its own normal form.

/// The normal form of a path as it is in `:path`, which may be any bytes.
pub fn normal(path: &[u8]) -> String {
    let path = path.split(|byte| matches!(byte, b'?' | b'#')).next().unwrap_or_default();
    if is_normal(path) { String::from_utf8_lossy(path).into_owned() } else { made_normal(path) }
}

/// The normal form of a path without what follows it.
fn made_normal(path: &[u8]) -> String {
    let text = spelled(path);
    if !text.starts_with('/') {
        // The asterisk of OPTIONS, and what is no path.
        return text;
    }
    let mut segments: Vec<&str> = Vec::new();
    let mut folder = true;
    for segment in text.split('/').skip(1) {
        folder = matches!(segment, "" | "." | "..");
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            name => segments.push(name),
        }
    }
    let mut normal = String::with_capacity(text.len());
    for segment in &segments {
        normal.push('/');
        normal.push_str(segment);
    }
    if folder || segments.is_empty() {
        normal.push('/');
    }
    normal
}

/// Whether a path surely is in its normal form already, as most are: nothing is escaped, and no segment is empty or begins
/// with a dot.
fn is_normal(path: &[u8]) -> bool {
    let mut before = 0;
    path.first() == Some(&b'/')
        && path.iter().all(|byte| {
            let opens = std::mem::replace(&mut before, *byte) == b'/';
            (is_unreserved(*byte) || is_allowed(*byte)) && !(opens && matches!(byte, b'/' | b'.'))
        })
}

/// Each byte in the one way in which it is written.
fn spelled(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    let mut rest = path;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        let (byte, is_escaped) = match (byte, after) {
            (b'%', after) => match escaped(after) {
                Some((byte, after)) => {
                    rest = after;
                    (byte, true)
                }
                None => (b'%', true),
            },
            (byte, _) => (*byte, false),
        };
        if is_unreserved(byte) || (!is_escaped && is_allowed(byte)) {
            text.push(char::from(byte));
        } else {
            const DIGITS: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
            text.push('%');
            text.extend([byte >> 4, byte & 15].iter().filter_map(|digit| DIGITS.get(usize::from(*digit))));
        }
    }
    text
}

/// The byte that the two hexadecimal digits after a percent sign stand for, and what follows them. `None` where there are
/// no such digits.
pub fn escaped(after: &[u8]) -> Option<(u8, &[u8])> {
    let [high, low, after @ ..] = after else { return None };
    Some((digit(*high)? << 4 | digit(*low)?, after))
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

const fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// What a path may hold as it is, besides: the sub-delimiters, and `:`, `@` and `/`.
const fn is_allowed(byte: u8) -> bool {
    matches!(byte, b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b';' | b'=' | b':' | b'@' | b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_resource_has_one_form() {
        let cases: &[(&[u8], &str)] = &[
            (b"/login", "/login"),
            (b"//login", "/login"),
            (b"/./login", "/login"),
            (b"/a/../login", "/login"),
            (b"/../../login", "/login"),
            (b"/%6Cogin", "/login"),
            (b"/%6cogin", "/login"),
            (b"/login?x=1", "/login"),
            (b"/login#top", "/login"),
            (b"/login/", "/login/"),
            (b"/login/.", "/login/"),
            (b"/login/x/..", "/login/"),
            (b"/%2e%2e/login", "/login"),
            (b"/a/%2E/login", "/a/login"),
            (b"/a%2flogin", "/a%2Flogin"),
            (b"/a%2Flogin", "/a%2Flogin"),
            (b"/a//b///c", "/a/b/c"),
            // Once: what is decoded is not decoded again.
            (b"/%252e%252e/login", "/%252e%252e/login"),
            (b"/%256Cogin", "/%256Cogin"),
            (b"/100%", "/100%25"),
            (b"/%zz", "/%25zz"),
            (b"/%", "/%25"),
            (b"/caf\xc3\xa9", "/caf%C3%A9"),
            (b"/caf%c3%a9", "/caf%C3%A9"),
            (b"/a b\"<>\\^`{|}\x7f\0", "/a%20b%22%3C%3E%5C%5E%60%7B%7C%7D%7F%00"),
            (b"/a;v=1/b,c:d@e!$&'()*+=", "/a;v=1/b,c:d@e!$&'()*+="),
            (b"", ""),
            (b"/", "/"),
            (b"?", ""),
            (b"/..", "/"),
            (b"*", "*"),
            (b"/.well-known/x", "/.well-known/x"),
        ];
        for (path, form) in cases {
            assert_eq!(normal(path), *form, "{}", path.escape_ascii());
        }
    }

    proptest::proptest! {
        #[test]
        fn the_form_is_its_own_form_printable_and_bounded(path: Vec<u8>) {
            let form = normal(&path);
            proptest::prop_assert_eq!(normal(form.as_bytes()), form.as_str());
            proptest::prop_assert!(form.bytes().all(|byte| byte.is_ascii_graphic()));
            proptest::prop_assert!(form.len() <= 3 * path.len());
        }

        #[test]
        fn what_is_normal_at_a_glance_is(path in "/[a-z%E?#./]{0,12}") {
            let path = path.split(['?', '#']).next().unwrap();
            proptest::prop_assert_eq!(normal(path.as_bytes()), made_normal(path.as_bytes()));
        }

        #[test]
        fn detours_change_nothing(segments in proptest::collection::vec("[a-z%2Ef.]{1,4}", 0..6)) {
            let straight = format!("/{}", segments.join("/"));
            let detour = format!("/.//x/..//{}", segments.join("//./"));
            proptest::prop_assert_eq!(normal(straight.as_bytes()), normal(detour.as_bytes()));
        }
    }
}
