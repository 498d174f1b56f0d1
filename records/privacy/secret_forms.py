"""The forms of secrets that this project looks for in addition to detect-secrets: only data.

A form begins with one of its anchors, which are searched for as plain text; the pattern is tried
only where one is found. No pattern looks further than a fixed number of characters, so that the
time is linear whatever the text. It does not know messages.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass

_FAR = 1024
"""The longest stretch that one pattern reads; the rest of a token is taken by its alphabet."""


_DIGIT = re.compile(r"[0-9]")
_LETTER = re.compile(r"[^\W\d_]")


def _anything(_text: str) -> bool:
    return True


def _has_digit(text: str) -> bool:
    return _DIGIT.search(text) is not None


def _is_basic(text: str) -> bool:
    """Whether the text is base64 of `user:password`."""
    try:
        plain = base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return False
    return ":" in plain and plain.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form: `pattern` is tried where an anchor is found, `check` is asked about its match.

    The finding begins `before` characters before the anchor, or is the group `value`.
    """

    anchors: tuple[str, ...]
    pattern: re.Pattern[str]
    check: Callable[[str], bool] = _anything
    before: int = 0


def _token(*prefixes: str, body: str = r"[A-Za-z0-9_-]", least: int = 16, digit: bool = False):
    """A prefix, then at least `least` characters of an alphabet."""
    starts = "|".join(re.escape(prefix) for prefix in sorted(prefixes, key=len, reverse=True))
    return Form(
        anchors=prefixes,
        pattern=re.compile(rf"(?<![A-Za-z0-9])(?:{starts}){body}{{{least},{_FAR}}}"),
        check=_has_digit if digit else _anything,
    )


_HEX = "[0-9a-f]"

SERVICE_TOKENS: dict[str, Form] = {
    "Adafruit": _token("aio_", least=24),
    "age": _token("AGE-SECRET-KEY-1", body="[0-9A-Z]", least=40),
    "Airtable": _token("pat", body=r"[A-Za-z0-9]{14}\.[0-9a-f]", least=60),
    "Alibaba": _token("LTAI", body="[A-Za-z0-9]", least=12, digit=True),
    "Atlassian": _token("ATATT3", "ATCTT3", "ATBB", body="[A-Za-z0-9_=-]", least=24),
    "Buildkite": _token("bkua_", body=_HEX, least=32),
    "Cerebras": _token("csk-", body="[a-z0-9]", least=32),
    "CircleCI": _token("CCIPAT_", least=20),
    "Clojars": _token("CLOJARS_", body="[a-z0-9]", least=40),
    "Contentful": _token("CFPAT-", least=20),
    "DigitalOcean": _token("dop_v1_", "doo_v1_", "dor_v1_", body=_HEX, least=40),
    "Docker": _token("dckr_pat_", "dckr_oat_", least=20),
    "Doppler": _token("dp.pt.", "dp.st.", "dp.ct.", body="[A-Za-z0-9.]", least=32),
    "Dynatrace": _token("dt0c01.", body="[A-Z0-9.]", least=24),
    "EasyPost": _token("EZAK", "EZTK", body="[A-Za-z0-9]", least=54),
    "Figma": _token("figd_", least=30),
    "Fireworks": _token("fw_", body="[A-Za-z0-9]", least=20, digit=True),
    "Fly.io": _token("fm1_", "fm2_", body=r"[A-Za-z0-9_+/=-]", least=40),
    "Grafana": _token("glsa_", "glc_", body=r"[A-Za-z0-9_+/=-]", least=32),
    "Groq": _token("gsk_", body="[A-Za-z0-9]", least=32),
    "Heroku": _token("HRKU-", least=36),
    "HubSpot": _token("pat-na1-", "pat-eu1-", body="[0-9a-f-]", least=36),
    "Jina": _token("jina_", least=32, digit=True),
    "LangSmith": _token("lsv2_pt_", "lsv2_sk_", body="[0-9a-f_]", least=32),
    "Linear": _token("lin_api_", "lin_oauth_", body="[A-Za-z0-9]", least=32),
    "Mailgun": _token("key-", "pubkey-", body=_HEX, least=32),
    "Mapbox": _token("sk.eyJ", body=r"[A-Za-z0-9_.-]", least=32),
    "Neon": _token("napi_", body="[a-z0-9]", least=40),
    "New Relic": _token("NRAK-", "NRJS-", body="[A-Za-z0-9]", least=19),
    "Notion": _token("ntn_", "secret_", body="[A-Za-z0-9]", least=40),
    "NVIDIA": _token("nvapi-", least=40),
    "1Password": _token("ops_eyJ", body=r"[A-Za-z0-9+/=_-]", least=60),
    "Perplexity": _token("pplx-", body="[A-Za-z0-9]", least=32),
    "Pinecone": _token("pcsk_", least=40),
    "PlanetScale": _token("pscale_tkn_", "pscale_pw_", "pscale_oauth_", least=32),
    "Postman": _token("PMAK-", body="[0-9a-f-]", least=40),
    "Prefect": _token("pnu_", "pnb_", body="[A-Za-z0-9]", least=30),
    "Pulumi": _token("pul-", body=_HEX, least=40),
    "Replicate": _token("r8_", body="[A-Za-z0-9]", least=30),
    "RubyGems": _token("rubygems_", body=_HEX, least=40),
    "Sendinblue": _token("xkeysib-", body="[0-9A-Za-z-]", least=64),
    "Sentry": _token("sntrys_", "sntryu_", body=r"[A-Za-z0-9+/=_-]", least=40),
    "Shippo": _token("shippo_live_", "shippo_test_", body=_HEX, least=32),
    "Shopify": _token("shpat_", "shpca_", "shppa_", "shpss_", body="[A-Fa-f0-9]", least=32),
    "SonarQube": _token("sqp_", "squ_", "sqa_", body=_HEX, least=40),
    "Sourcegraph": _token("sgp_", body="[0-9a-f_]", least=40),
    "Supabase": _token("sbp_", "sb_secret_", body="[A-Za-z0-9_]", least=30),
    "Tailscale": _token("tskey-", least=20),
    "Tavily": _token("tvly-", least=20, digit=True),
    "Terraform Cloud": Form(
        anchors=(".atlasv1.",),
        pattern=re.compile(r"(?<=[A-Za-z0-9]{14})\.atlasv1\.[A-Za-z0-9_=-]{40,1024}"),
        before=14,
    ),
    "Together": _token("tgp_v1_", least=30),
    "Typeform": _token("tfp_", least=40),
    "xAI": _token("xai-", body="[A-Za-z0-9]", least=40),
}
"""Tokens of services that share the kind `service_token`, by the name of the service."""

SECRET_NAMES = ("secret", "token", "password", "passwd", "passphrase", "pwd", "key")
"""What the name of a secret ends with, in lower case."""
_KEY_OF = re.compile(r"(?:api|access|secret|private|auth|signing|encryption|account)[_-]?\Z", re.I)
_PLACEHOLDER = re.compile(
    r"(?:[$%&*<{\[]|x{3}|\.{3}|your|my[_-]|the[_-]|some[_-]|change|insert|placeholder|example|dummy|fake"
    r"|none|null|true|false|string|redacted|(?:pw|pass|passwd|password|secret|token)$"
    r"|os\.|self\.|env\.|process\.|config)",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"(?P<close>\\?[\"'`]?\]?)(?P<space>[ \t]{0,3})(?:=>|:=|==?|:)[ \t]{0,3}(?P<open>\\?[\"'`]?)"
    r"(?P<value>[A-Za-z0-9+/=_.~!@#$%^&*:-]{6,512})(?P<next>[(\[{]?)"
)
_PAGES = re.compile(
    r"(?:next|page|continuation|sync|pad|eos|bos|stop|mask|unk|cls|sep)[_-]?\Z", re.I
)
"""What comes before `token` if the token is not a secret: of pages, and of tokenizers."""


_IN_QUERY = re.compile(r"[?&][\w-]{0,15}\Z")


def is_placeholder(value: str) -> bool:
    """Whether a value only takes the place of a secret: `your-key`, `$TOKEN`, `password`."""
    return _PLACEHOLDER.match(value) is not None


def assigned(text: str, name: str, start: int) -> tuple[int, int] | None:
    """The value that is assigned to a name of a secret at `start`: `API_KEY=value`.

    If the name is written like an environment variable, any value counts that is not a placeholder;
    otherwise it needs a letter and a digit, and an unquoted expression does not count.
    """
    match = _ASSIGNED.match(text, start + len(name))
    if match is None or match["next"]:
        return None
    before = text[max(start - 16, 0) : start]
    if name == "key" and not _KEY_OF.search(before):
        return None
    if name == "token" and _PAGES.search(before):
        return None
    value = match["value"]
    if _IN_QUERY.search(before):
        value = value.partition("&")[0]
    value = value.rstrip(".:&")
    if len(value) < 6 or is_placeholder(value):
        return None
    first = match.start("value")
    found = first, first + len(value)
    is_environment = text[start : match.end("close")].isupper() and text[match.end("close")] == "="
    if is_environment:
        return found
    if not _has_digit(value) or _LETTER.search(value) is None:
        return None
    return found if match["open"] or not _is_expression(value) else None


def _is_expression(value: str) -> bool:
    """Whether it looks like names in a program: `tokens.token_1`, `sha256`, `token_0`."""
    return bool(re.fullmatch(r"[A-Za-z_]+\d{0,4}(?:[._][A-Za-z_]*\d{0,4}){0,8}", value))


FORMS: dict[str, tuple[Form, ...]] = {
    "opd_key": (_token("opd_", body=r"[0-9a-f]{12}_[A-Za-z0-9_-]", least=20),),
    "anthropic_key": (_token("sk-ant-", least=16),),
    "openai_key": (
        _token("sk-proj-", "sk-svcacct-", "sk-admin-", "sk-or-v1-", "sk-lf-", least=16),
        _token("sk-", body="[A-Za-z0-9]", least=20, digit=True),
        _token("sess-", body="[A-Za-z0-9]", least=40),
    ),
    "google_key": (
        _token("AIza", least=35),
        _token("ya29.", least=20),
        _token("GOCSPX-", least=20),
        _token("1//0", least=40),
    ),
    "huggingface_token": (_token("hf_", "api_org_", body="[A-Za-z0-9]", least=30),),
    "github_token": (
        _token("github_pat_", body="[A-Za-z0-9_]", least=22),
        _token("ghp_", "gho_", "ghu_", "ghs_", "ghr_", body="[A-Za-z0-9_]", least=36),
    ),
    "slack_token": (
        _token("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xoxc-", "xoxd-"),
        _token("xoxe.xoxp-", "xapp-", "xwfp-", least=16),
        Form(
            anchors=("hooks.slack.com/",),
            pattern=re.compile(r"hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]{10,200}"),
        ),
    ),
    "databricks_token": (_token("dapi", body=_HEX, least=32),),
    "vault_token": (_token("hvs.", "hvb.", "hvr.", least=20),),
    "azure_secret": (
        Form(
            anchors=("Q~",),
            pattern=re.compile(r"(?<=[A-Za-z0-9_~.-]{4})Q~[A-Za-z0-9_~.-]{31,40}"),
            before=4,
        ),
        Form(
            anchors=("SharedAccessKey=", "sig="),
            pattern=re.compile(r"(?:SharedAccessKey|(?<=[?&])sig)=[A-Za-z0-9+/%]{30,200}={0,2}"),
        ),
    ),
    "discord_token": (
        Form(
            anchors=("/api/webhooks/",),
            pattern=re.compile(r"/api/webhooks/\d{15,22}/[A-Za-z0-9_-]{40,100}"),
        ),
    ),
    "npm_token": (_token("npm_", body="[A-Za-z0-9]", least=36),),
    "pypi_token": (_token("pypi-", least=50),),
    "square_token": (
        _token("sq0atp-", "sq0csp-", "sq0idp-", least=20),
        _token("EAAA", least=56),
    ),
    "stripe_key": (
        _token("sk_live_", "rk_live_", "sk_test_", "rk_test_", body="[A-Za-z0-9]", least=16),
        _token("whsec_", body=r"[A-Za-z0-9+/=]", least=20),
    ),
    "service_token": tuple(SERVICE_TOKENS.values()),
    "auth_header": (
        Form(
            anchors=("Bearer ", "bearer ", "BEARER "),
            pattern=re.compile(r"(?i:bearer) {1,4}(?P<value>[A-Za-z0-9._~+/=-]{12,1024})"),
            check=_has_digit,
        ),
        Form(
            anchors=("Basic ", "basic ", "BASIC "),
            pattern=re.compile(r"(?i:basic) {1,4}(?P<value>[A-Za-z0-9+/]{6,1024}={0,2})"),
            check=_is_basic,
        ),
    ),
}
"""Forms by kind; if several find the same text, the first one names it."""
