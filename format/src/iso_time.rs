//! Dates and times as Python's `isoformat()` writes them. Spec: section 5, "Class tags".

/// Returns whether the bytes are a date: `2026-11-28`.
pub(crate) fn is_date(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    take_date(&mut rest).is_some() && rest.is_empty()
}

/// Returns whether the bytes are a time: `09:30:00`, `09:30:00.000500`, each with or without an offset such as `+02:00`.
pub(crate) fn is_time(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    take_time(&mut rest).is_some() && (rest.is_empty() || is_offset(rest))
}

/// Returns whether the bytes are a date and a time, with `T` between them.
pub(crate) fn is_datetime(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    take_date(&mut rest).is_some() && take(&mut rest, b'T').is_some() && is_time(rest)
}

/// Returns whether the bytes are an offset of less than a day: `+02:00`, `-00:00:30`, `+01:00:00.000001`.
fn is_offset(bytes: &[u8]) -> bool {
    let Some((sign @ (b'+' | b'-'), mut rest)) = bytes.split_first() else { return false };
    let parse = |rest: &mut &[u8]| {
        let mut is_zero = take_number(rest, 2, 0..=23)? == 0;
        take(rest, b':')?;
        is_zero &= take_number(rest, 2, 0..=59)? == 0;
        if !rest.is_empty() {
            take(rest, b':')?;
            let seconds = take_number(rest, 2, 0..=59)?;
            let microseconds = take_microseconds(rest)?;
            // Python leaves seconds out if they and the microseconds are 0.
            (seconds != 0 || microseconds != 0).then_some(())?;
            is_zero = false;
        }
        (rest.is_empty() && !(is_zero && *sign == b'-')).then_some(())
    };
    parse(&mut rest).is_some()
}

fn take_date(rest: &mut &[u8]) -> Option<()> {
    let year = take_number(rest, 4, 1..=9999)?;
    take(rest, b'-')?;
    let month = take_number(rest, 2, 1..=12)?;
    take(rest, b'-')?;
    let is_leap_year = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 if is_leap_year => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    take_number(rest, 2, 1..=days).map(drop)
}

fn take_time(rest: &mut &[u8]) -> Option<()> {
    take_number(rest, 2, 0..=23)?;
    take(rest, b':')?;
    take_number(rest, 2, 0..=59)?;
    take(rest, b':')?;
    take_number(rest, 2, 0..=59)?;
    take_microseconds(rest).map(drop)
}

/// Takes a dot and six digits that are not all 0, or nothing.
fn take_microseconds(rest: &mut &[u8]) -> Option<u32> {
    if take(rest, b'.').is_none() {
        return Some(0);
    }
    take_number(rest, 6, 1..=999_999)
}

fn take_number(
    rest: &mut &[u8],
    digits: usize,
    range: std::ops::RangeInclusive<u32>,
) -> Option<u32> {
    let (number, tail) = rest.split_at_checked(digits)?;
    *rest = tail;
    let number = number.iter().try_fold(0, |number, byte| {
        byte.is_ascii_digit().then(|| number * 10 + u32::from(byte - b'0'))
    })?;
    range.contains(&number).then_some(number)
}

fn take(rest: &mut &[u8], byte: u8) -> Option<()> {
    *rest = rest.strip_prefix(&[byte])?;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::{is_date, is_datetime, is_time};

    #[test]
    fn dates_are_those_of_the_calendar() {
        for date in ["0001-01-01", "2024-02-29", "2000-02-29", "9999-12-31"] {
            assert!(is_date(date.as_bytes()), "{date}");
        }
        for date in
            ["0000-01-01", "2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-1-01", ""]
        {
            assert!(!is_date(date.as_bytes()), "{date}");
        }
    }

    #[test]
    fn times_have_one_form() {
        for time in ["00:00:00", "23:59:59.000001", "12:00:00+00:00", "12:00:00-23:59:59.999999"] {
            assert!(is_time(time.as_bytes()), "{time}");
        }
        for time in [
            "24:00:00",
            "12:00",
            "12:00:00.5",
            "12:00:00.000000",
            "12:00:00Z",
            "12:00:00-00:00",
            "12:00:00+24:00",
            "12:00:00+01:00:00",
            "12:00:00+01:00:00.000000",
            "12:00:00+01",
        ] {
            assert!(!is_time(time.as_bytes()), "{time}");
        }
        assert!(is_datetime(b"2026-11-28T09:30:00+02:00"));
        assert!(!is_datetime(b"2026-11-28 09:30:00"));
    }
}
