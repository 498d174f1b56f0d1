"""Where secrets and personal data are in a text, by kind.

Patterns of secrets are those of detect-secrets and our own (records/privacy/secret_forms.py), phone
numbers are found by phonenumbers, and python-stdnum tells whether digits are an account or a card:
digits alone count only if their check digits are right. The network is never used. Names and
addresses are not found: that takes a language model, which finds only half of them.

A detector takes linear time, whatever the text: a pattern sees a window of fixed length, or begins
at plain text that is searched for first. Rare things are looked for only where that plain text is.
What is found and what is not: docs/records.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from records.privacy.personal_data import PERSONAL, personal_detectors
from records.privacy.secret_forms import FORMS, SECRET_NAMES, Form, assigned, is_placeholder
from records.privacy.text_view import Detector, Span, View

_WINDOW, _OVERLAP = 1536, 512
"""Some patterns take quadratic time on an attacker's text: they see only this much at once."""
BREAK = "\x00"
"""Separates texts that are looked at together; no finding extends across it."""

SECRETS = (
    "opd_key",
    "anthropic_key",
    "openai_key",
    "google_key",
    "huggingface_token",
    "github_token",
    "gitlab_token",
    "slack_token",
    "databricks_token",
    "vault_token",
    "aws_key",
    "azure_storage_key",
    "azure_secret",
    "stripe_key",
    "square_token",
    "sendgrid_key",
    "mailchimp_key",
    "twilio_key",
    "npm_token",
    "pypi_token",
    "discord_token",
    "telegram_token",
    "private_key",
    "jwt",
    "service_token",
    "basic_auth",
    "auth_header",
    "secret_value",
)
TOO_LONG = "too_long"
"""The kind of a text that is removed because it is too long to be searched."""

_TOKEN_END = re.compile(r"[A-Za-z0-9_-]*")
_AWS_SECRET = re.compile(
    r"(?i:aws|secret)[\w.-]{0,40}+[\"'\\]{0,3}\s{0,4}(?:=>|[:=,])?\s{0,4}[\"'\\]{0,3}"
    r"(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"
)
_JWT = re.compile(
    r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{1,4096}+\.[A-Za-z0-9_-]{1,16384}(?:\.[A-Za-z0-9_+/-]*=*)?"
)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----|PuTTY-User-Key-File-\d")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----|Private-MAC: \w{0,80}")
_PEM_BODY = re.compile(r"(?:[\w+/=:,. \t\r\n-]|\\[rn])*")
_PEM_LENGTH = 16_384
_URL_LOGIN = re.compile(
    r"://(?:[^\s:/@?#\"'<>\\\x00]{0,128}:(?P<password>[^\s/\"'<>\\\x00]{1,256})"
    r"|(?P<token>[A-Za-z0-9_-]{20,256}))@(?=[\w\[{$-])"
)
_SHORT_FORMS = ("auth_header",)
_BORROWED = {
    "aws_key": ("akia", "asia", "abia", "acca", "a3t", "aws"),
    "azure_storage_key": ("accountkey=",),
    "discord_token": (".",),
    "gitlab_token": ("gl", "gr1348941"),
    "mailchimp_key": ("-us",),
    "pypi_token": ("pypi-age",),
    "sendgrid_key": ("sg.",),
    "slack_token": ("xox", "hooks.slack.com"),
    "square_token": ("sq0csp-",),
    "stripe_key": ("k_live_",),
    "telegram_token": (":",),
    "twilio_key": ("ac", "sk"),
}
"""Kinds that use detect-secrets' patterns, and what their texts contain in lower case."""


def detectors(patterns: Mapping[str, str], phone_region: str | None) -> dict[str, Detector]:
    """All detectors by kind; `patterns` are further ones, as regular expressions.

    `phone_region` (two letters) is the country of phone numbers without a country code; if it is
    not set, only those with one are found. If several kinds find the same text, the first one names
    it.
    """
    found: dict[str, list[Detector]] = {kind: [] for kind in (*SECRETS, *PERSONAL)}
    for kind, forms in FORMS.items():
        anchored = tuple((anchor, form) for form in forms for anchor in form.anchors)
        found[kind].append(partial(_forms, kind in _SHORT_FORMS, anchored))
    for kind, borrowed in _plugins().items():
        found[kind].append(partial(_secrets, _BORROWED[kind], borrowed))
    own: dict[str, Detector] = {
        "aws_key": _aws_secrets,
        "private_key": _private_keys,
        "jwt": _jwts,
        "basic_auth": _url_logins,
        "secret_value": _assigned,
        **personal_detectors(phone_region),
    }
    for kind, detector in own.items():
        found[kind].append(detector)
    assert all(found.values())
    known: dict[str, Detector] = {
        kind: partial(_all, tuple(several)) for kind, several in found.items()
    }
    for kind, pattern in patterns.items():
        known[kind] = partial(_matches, re.compile(pattern))
    return known


def _all(several: tuple[Detector, ...], view: View) -> Iterator[Span]:
    for detector in several:
        yield from detector(view)


def _plugins() -> dict[str, tuple[re.Pattern[str], ...]]:
    # Imported here: they import requests, which most commands never need.
    from detect_secrets.plugins.aws import AWSKeyDetector
    from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
    from detect_secrets.plugins.discord import DiscordBotTokenDetector
    from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
    from detect_secrets.plugins.mailchimp import MailchimpDetector
    from detect_secrets.plugins.pypi_token import PypiTokenDetector
    from detect_secrets.plugins.sendgrid import SendGridDetector
    from detect_secrets.plugins.slack import SlackDetector
    from detect_secrets.plugins.square_oauth import SquareOAuthDetector
    from detect_secrets.plugins.stripe import StripeDetector
    from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
    from detect_secrets.plugins.twilio import TwilioKeyDetector

    plugins: dict[str, Any] = {
        "aws_key": AWSKeyDetector,
        "azure_storage_key": AzureStorageKeyDetector,
        "discord_token": DiscordBotTokenDetector,
        "gitlab_token": GitLabTokenDetector,
        "mailchimp_key": MailchimpDetector,
        "pypi_token": PypiTokenDetector,
        "sendgrid_key": SendGridDetector,
        "slack_token": SlackDetector,
        "square_token": SquareOAuthDetector,
        "stripe_key": StripeDetector,
        "telegram_token": TelegramBotTokenDetector,
        "twilio_key": TwilioKeyDetector,
    }
    return {kind: tuple(plugin.denylist) for kind, plugin in plugins.items()}


def _windows(text: str) -> Iterator[Span]:
    for start in range(0, max(len(text) - _OVERLAP, 1), _WINDOW - _OVERLAP):
        yield start, start + _WINDOW


def _secrets(
    needs: Iterable[str], patterns: Iterable[re.Pattern[str]], view: View
) -> Iterator[Span]:
    if not view.may_hold_token or not any(need in view.lowered for need in needs):
        return
    text = view.text
    for pattern in patterns:
        done = 0
        for start, end in _windows(text):
            for match in pattern.finditer(text, start, end):
                if match.start() >= done:
                    # A token that continues is taken whole: none of its end may stay.
                    done = _token_end(text, match.end())
                    yield match.start(), done


def _token_end(text: str, end: int) -> int:
    match = _TOKEN_END.match(text, end)
    return match.end() if match is not None else end


def _forms(
    may_be_short: bool, anchored: tuple[tuple[str, Form], ...], view: View
) -> Iterator[Span]:
    if may_be_short or view.may_hold_token:
        text = view.text
        for anchor, form in anchored:
            if anchor in text:
                yield from _form(anchor, form, text)


def _form(anchor: str, form: Form, text: str) -> Iterator[Span]:
    group = "value" if "value" in form.pattern.groupindex else 0
    start = text.find(anchor)
    while start >= 0:
        match = form.pattern.match(text, start)
        if match is None:
            start = text.find(anchor, start + len(anchor))
            continue
        first, last = match.span(group)
        first -= form.before
        if form.check(text[first:last]):
            last = _token_end(text, last)
            yield first, last
        start = text.find(anchor, last)


def _matches(pattern: re.Pattern[str], view: View) -> Iterator[Span]:
    return (match.span() for match in pattern.finditer(view.text))


def _aws_secrets(view: View) -> Iterator[Span]:
    text = view.text
    if not view.may_hold_token or not ("aws" in view.lowered or "secret" in view.lowered):
        return
    for start, end in _windows(text):
        for match in _AWS_SECRET.finditer(text, start, end):
            value = match["value"]
            if any("0" <= one <= "9" for one in value) and not value.islower():
                yield match.span("value")


def _assigned(view: View) -> Iterator[Span]:
    text, lowered = view.text, view.lowered
    for name in SECRET_NAMES:
        start = lowered.find(name)
        while start >= 0:
            span = assigned(text, name, start)
            if span is not None:
                yield span
            start = lowered.find(name, start + len(name))


def _jwts(view: View) -> Iterator[Span]:
    text = view.text
    if "eyJ" not in text:
        return
    from detect_secrets.plugins.jwt import JwtTokenDetector

    start = text.find("eyJ")
    while start >= 0:
        match = _JWT.match(text, start)
        if match is not None and JwtTokenDetector.is_formally_valid(match.group()):
            yield start, _token_end(text, match.end())
        start = text.find("eyJ", match.end() if match is not None else start + 3)


def _private_keys(view: View) -> Iterator[Span]:
    text = view.text
    done = 0
    for anchor in ("-----BEGIN", "PuTTY-User-Key-File-"):
        start = text.find(anchor)
        while start >= 0:
            done = start + len(anchor)
            if _PEM.match(text, start) is not None:
                done = _pem_end(text, start)
                yield start, done
            start = text.find(anchor, done)


def _pem_end(text: str, start: int) -> int:
    """The end of the key that begins here; if none is found, the end of what may belong to it."""
    last = min(start + _PEM_LENGTH, len(text))
    broken = text.find(BREAK, start, last)
    last = broken if broken >= 0 else last
    end = _PEM_END.search(text, start, last)
    if end is not None:
        return end.end()
    body = _PEM_BODY.match(text, start, last)
    return body.end() if body is not None else last


def _url_logins(view: View) -> Iterator[Span]:
    text = view.text
    start = text.find("://")
    while start >= 0:
        match = _URL_LOGIN.match(text, start)
        if match is not None:
            group = "password" if match["password"] else "token"
            if not is_placeholder(match[group]):
                yield match.span(group)
        start = text.find("://", start + 3)
