"""Where in a text secrets and personal data stand, by kind.

The patterns of secrets are those of detect-secrets, phone numbers are found by phonenumbers, and
python-stdnum says whether digits are an account or a card: what is made of digits alone counts only
if its check digits are right. Nothing is asked of any network. Names and addresses are not found:
that takes a language model, and finds half of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

Span: TypeAlias = tuple[int, int]
Detector: TypeAlias = Callable[[str], Iterator[Span]]

_WINDOW, _OVERLAP = 1536, 512
"""Some patterns take quadratic time on what an attacker may write: they see this much at once."""

SECRETS = (
    "aws_key",
    "azure_storage_key",
    "basic_auth",
    "discord_token",
    "github_token",
    "gitlab_token",
    "jwt",
    "mailchimp_key",
    "npm_token",
    "openai_key",
    "private_key",
    "pypi_token",
    "sendgrid_key",
    "slack_token",
    "square_token",
    "stripe_key",
    "telegram_token",
    "twilio_key",
)
PERSONAL = ("email", "phone", "iban", "credit_card", "us_ssn")

_GROUP_IS_SECRET = ("aws_key", "basic_auth")
_JWT = re.compile(r"(?<![A-Za-z0-9_=-])eyJ[A-Za-z0-9_=-]+\.[A-Za-z0-9_=-]+\.?[A-Za-z0-9_.+/=-]*")
_NPM = re.compile(r"npm_[A-Za-z0-9]{36}")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
    r"(?:(?!-----END)[\s\S])*(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----)?"
)
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"
)
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}\b")
_CARD = re.compile(r"(?<![\w-])[2-6]\d(?:[ -]?\d){11,17}(?![\w-])")
_US_SSN = re.compile(r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])")


def detectors(patterns: Mapping[str, str], phone_region: str | None) -> dict[str, Detector]:
    """All detectors by kind; `patterns` are further ones, as regular expressions.

    `phone_region` (two letters) is where phone numbers without a country code belong; without it
    only those with one are found.
    """
    found: dict[str, Detector] = {
        **_secret_detectors(),
        "jwt": _jwt,
        "npm_token": partial(_matches, _NPM),
        "private_key": partial(_matches, _PRIVATE_KEY),
        "email": partial(_matches, _EMAIL),
        "phone": partial(_phones, phone_region),
        "iban": _ibans,
        "credit_card": _cards,
        "us_ssn": _us_ssns,
    }
    assert set(found) == {*SECRETS, *PERSONAL}
    return found | {kind: partial(_matches, re.compile(own)) for kind, own in patterns.items()}


def _secret_detectors() -> dict[str, Detector]:
    # Imported here: they bring requests with them, which most commands never need.
    from detect_secrets.plugins.aws import AWSKeyDetector
    from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
    from detect_secrets.plugins.basic_auth import BasicAuthDetector
    from detect_secrets.plugins.discord import DiscordBotTokenDetector
    from detect_secrets.plugins.github_token import GitHubTokenDetector
    from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
    from detect_secrets.plugins.mailchimp import MailchimpDetector
    from detect_secrets.plugins.openai import OpenAIDetector
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
        "basic_auth": BasicAuthDetector,
        "discord_token": DiscordBotTokenDetector,
        "github_token": GitHubTokenDetector,
        "gitlab_token": GitLabTokenDetector,
        "mailchimp_key": MailchimpDetector,
        "openai_key": OpenAIDetector,
        "pypi_token": PypiTokenDetector,
        "sendgrid_key": SendGridDetector,
        "slack_token": SlackDetector,
        "square_token": SquareOAuthDetector,
        "stripe_key": StripeDetector,
        "telegram_token": TelegramBotTokenDetector,
        "twilio_key": TwilioKeyDetector,
    }
    return {
        kind: partial(_secrets, tuple(plugin.denylist), kind in _GROUP_IS_SECRET)
        for kind, plugin in plugins.items()
    }


def _secrets(patterns: tuple[re.Pattern[str], ...], in_group: bool, text: str) -> Iterator[Span]:
    for start in range(0, max(len(text) - _OVERLAP, 1), _WINDOW - _OVERLAP):
        window = text[start : start + _WINDOW]
        for pattern in patterns:
            for match in pattern.finditer(window):
                first, last = match.span(1 if in_group and pattern.groups else 0)
                yield start + first, start + last


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[Span]:
    return (match.span() for match in pattern.finditer(text))


def _jwt(text: str) -> Iterator[Span]:
    from detect_secrets.plugins.jwt import JwtTokenDetector

    for match in _JWT.finditer(text):
        if JwtTokenDetector.is_formally_valid(match.group()):
            yield match.span()


def _phones(region: str | None, text: str) -> Iterator[Span]:
    if not any(digit in text for digit in "0123456789"):
        return
    from phonenumbers import PhoneNumberMatcher

    # By default it gives up after so many candidates, and says nothing.
    for match in PhoneNumberMatcher(text, region, max_tries=len(text)):
        yield match.start, match.end


def _ibans(text: str) -> Iterator[Span]:
    from stdnum import iban

    for match in _IBAN.finditer(text):
        # Words in capitals that follow look like more of it.
        for end in range(match.end(), match.start() + 14, -1):
            if iban.is_valid(text[match.start() : end]):
                yield match.start(), end
                break


def _cards(text: str) -> Iterator[Span]:
    from stdnum import luhn

    for match in _CARD.finditer(text):
        if luhn.is_valid(re.sub("[ -]", "", match.group())):
            yield match.span()


def _us_ssns(text: str) -> Iterator[Span]:
    from stdnum.us import ssn

    return (match.span() for match in _US_SSN.finditer(text) if ssn.is_valid(match.group()))
