"""Where personal data is in a text: addresses, phone numbers, accounts, cards and US social
security numbers. Digits alone count only if their check digits are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from records.privacy.role_addresses import is_nobodys
from records.privacy.text_view import Detector, Span, View, pieces

PERSONAL = ("email", "phone", "iban", "credit_card", "us_ssn")

_LOCAL = re.compile(r"[\w.%+-]{1,64}")
_DOMAIN = re.compile(r"(?:[^\W_][\w-]{0,62}\.){1,8}[^\W\d_]{2,24}")
_IBAN = re.compile(r"[A-Z]{2}\d{2}(?<![^\W_][A-Z]{2}\d{2})(?: ?[A-Z0-9]){11,30}(?![^\W_])")
_CARD = re.compile(r"[2-6]\d(?<![\w-]\d\d)(?<!\d\.\d\d)(?:[ -]?\d){11,17}(?![\w-])")
_ISSUED = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}"
    r"|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|35(?:2[89]|[3-8]\d)\d{12}"
    r"|6(?:011|4[4-9]\d|5\d\d)\d{12}|62\d{14,17}|(?:50[123]\d|5893|6304|6759|676[1-3])\d{9,15}"
)
"""The prefixes and lengths of numbers that card issuers use."""
_US_SSN = re.compile(r"\d{3}-(?<![\w-]\d{3}-)\d{2}-\d{4}(?![\w-])")
_PLUS = re.compile(r"[+\uff0b](?=(?:[\s()./-]{0,3}\d){7})")
_PHONE_LENGTH = 64
_STRETCH, _AROUND = 4096, 256
_DIGIT = re.compile(r"\d")


def personal_detectors(phone_region: str | None) -> dict[str, Detector]:
    """The detectors by kind; `phone_region` is the country of numbers without a country code."""
    return {
        "email": _emails,
        "phone": partial(_phones, phone_region),
        "iban": _ibans,
        "credit_card": _cards,
        "us_ssn": _us_ssns,
    }


def _emails(view: View) -> Iterator[Span]:
    text = view.text
    at = text.find("@")
    while at >= 0:
        local = _LOCAL.match(text[max(at - 64, 0) : at][::-1])
        domain = _DOMAIN.match(text, at + 1) if local is not None else None
        if local is not None and domain is not None:
            # Dots that end a sentence before the address are not part of it.
            start = at - len(local.group().rstrip(".%+-"))
            if start < at and not is_nobodys(text[start : domain.end()]):
                yield start, domain.end()
        at = text.find("@", at + 1)


def _phones(region: str | None, view: View) -> Iterator[Span]:
    text = view.text
    if region is not None:
        yield from _phones_of(region, text)
        return
    # Without a region, only numbers that begin with a plus count.
    if "+" not in text and "\uff0b" not in text:
        return
    done = 0
    for plus in pieces(_PLUS, text):
        if plus.start() >= done:
            done = plus.start()
            last = plus.start() + _PHONE_LENGTH
            following = text.find("+", plus.start() + 1, last)
            last = following if following >= 0 else last
            for start, end in _phones_in(text, None, plus.start(), last):
                done = max(done, end)
                yield start, end


def _phones_of(region: str, text: str) -> Iterator[Span]:
    """Numbers anywhere in a text. The library sees a stretch at a time, because it searches on to
    the end if no number begins, in one call that blocks the interpreter.
    """
    for start in range(0, len(text), _STRETCH):
        end = min(start + _STRETCH, len(text))
        if _DIGIT.search(text, start, end) is None:
            continue
        first, last = max(start - _AROUND, 0), end + _AROUND
        for found in _phones_in(text, region, first, last):
            # What begins outside is whole in another stretch.
            if start <= found[0] < end:
                yield found


def _phones_in(text: str, region: str | None, start: int, end: int) -> Iterator[Span]:
    from phonenumbers import PhoneNumberMatcher

    # The characters before show whether a number begins here.
    first = max(start - 2, 0)
    part = text[first:end]
    # By default it silently gives up after a number of candidates.
    for match in PhoneNumberMatcher(part, region, max_tries=len(part)):
        yield first + match.start, first + match.end


def _ibans(view: View) -> Iterator[Span]:
    text = view.text
    from stdnum import iban

    for match in pieces(_IBAN, text):
        # Words in capitals after it look like more of it.
        for end in range(match.end(), match.start() + 14, -1):
            is_end = text[end - 1] != " " and not text[end : end + 1].isalnum()
            if is_end and iban.is_valid(text[match.start() : end]):
                yield match.start(), end
                break


def _cards(view: View) -> Iterator[Span]:
    text = view.text
    from stdnum import luhn

    for match in pieces(_CARD, text):
        digits = match.group().replace(" ", "").replace("-", "")
        if _ISSUED.fullmatch(digits) and luhn.is_valid(digits):
            yield match.span()


def _us_ssns(view: View) -> Iterator[Span]:
    from stdnum.us import ssn

    found = pieces(_US_SSN, view.text)
    return (match.span() for match in found if ssn.is_valid(match.group()))
