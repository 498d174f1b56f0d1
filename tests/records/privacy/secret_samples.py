"""One sample of each form that redaction looks for, put together from parts so that none is a key.

`(label, kind, text, secret)`: `secret` is the part of `text` of which nothing may stay.
"""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

UPPER, LOWER, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz", "0123456789"
MIXED = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0u1V2w3X4y5Z6"
HEX = "0123456789abcdef" * 8


class Sample(NamedTuple):
    label: str
    kind: str
    text: str
    secret: str


def mixed(number: int) -> str:
    return (MIXED * 8)[:number]


def token(label: str, kind: str, prefix: str, body: str) -> Sample:
    secret = prefix + body
    return Sample(label, kind, f"Use {secret} for it.", secret)


def within(label: str, kind: str, text: str, secret: str) -> Sample:
    return Sample(label, kind, text.format(secret), secret)


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJlX29mX2l0"
PEM = "-----BEGIN {0} KEY-----\nMIIEow\nAAA=\n-----END {0} KEY-----"
BASIC = base64.b64encode(b"aladdin:opensesame").decode()

_HEADS = {
    "openai_key": "sess-",
    "google_key": "1//0",
    "huggingface_token": "api_org_",
    "github_token": "ghu_",
    "slack_token": "xoxa- xoxe- xoxo- xoxp- xoxr- xoxs- xoxc- xoxd- xoxe.xoxp- xwfp-",
    "vault_token": "hvr.",
    "square_token": "sq0idp- EAAA",
    "stripe_key": "rk_test_",
    "service_token": (
        "aio_ AGE-SECRET-KEY-1 LTAI ATCTT3 ATBB bkua_ csk- CCIPAT_ CLOJARS_ CFPAT- doo_v1_ dor_v1_ "
        "dckr_oat_ dp.pt. dp.st. dp.ct. dt0c01. EZAK EZTK fw_ fm1_ glc_ HRKU- pat-eu1- jina_ "
        "lsv2_sk_ lin_oauth_ pubkey- sk.eyJ napi_ NRJS- secret_ ops_eyJ pscale_tkn_ pscale_pw_ "
        "pscale_oauth_ pnu_ pnb_ pul- rubygems_ xkeysib- sntryu_ shippo_live_ shippo_test_ shpca_ "
        "shppa_ shpss_ sqp_ squ_ sqa_ sgp_ sb_secret_ tskey- tgp_v1_ tfp_"
    ),
}
"""Heads of tokens by kind; what follows any of them may be hexadecimal."""
_IN_CAPITALS = ("AGE-SECRET-KEY-1", "dt0c01.")
_BY_HEAD = tuple(
    token(head, kind, head, HEX[:64].upper() if head in _IN_CAPITALS else HEX[:64])
    for kind, heads in _HEADS.items()
    for head in heads.split()
)

SAMPLES = (
    *_BY_HEAD,
    token("own key", "opd_key", "opd" + "_", "0123456789ab_" + mixed(43)),
    token("Anthropic", "anthropic_key", "sk-" + "ant-api03-", mixed(50) + "-" + mixed(40) + "AA"),
    token("Anthropic, admin", "anthropic_key", "sk-" + "ant-admin01-", mixed(80)),
    token("OpenAI, project", "openai_key", "sk-" + "proj-", mixed(74) + "T3BlbkFJ" + mixed(74)),
    token(
        "OpenAI, dashes", "openai_key", "sk-" + "proj-", "a1-B2_c3" * 8 + "T3BlbkFJ-_" + "x-Y" * 9
    ),
    token("OpenAI, service", "openai_key", "sk-" + "svcacct-", mixed(60)),
    token("OpenAI, admin", "openai_key", "sk-" + "admin-", mixed(60)),
    token("OpenAI, older", "openai_key", "sk-", mixed(20) + "T3BlbkFJ" + mixed(20)),
    token("OpenRouter", "openai_key", "sk-" + "or-v1-", HEX[:64]),
    token("DeepSeek", "openai_key", "sk-", HEX[:32]),
    token("Langfuse", "openai_key", "sk-" + "lf-", "0f1e2d3c-aaaa-bbbb-cccc-0123456789ab"),
    token("Google API", "google_key", "AI" + "za", mixed(35)),
    token("Google OAuth", "google_key", "ya" + "29.", mixed(60)),
    token("Google client", "google_key", "GOC" + "SPX-", mixed(28)),
    token("Hugging Face", "huggingface_token", "hf" + "_", mixed(34)),
    token("GitHub, fine-grained", "github_token", "github" + "_pat_", mixed(22) + "_" + mixed(59)),
    token("GitHub, classic", "github_token", "gh" + "p_", mixed(36)),
    token("GitHub, OAuth", "github_token", "gh" + "o_", mixed(36)),
    token("GitHub, server", "github_token", "gh" + "s_", mixed(36)),
    token("GitHub, refresh", "github_token", "gh" + "r_", mixed(76)),
    token("GitLab", "gitlab_token", "gl" + "pat-", mixed(20)),
    token("GitLab, runner", "gitlab_token", "gl" + "rt-", mixed(20)),
    token("Slack, bot", "slack_token", "xo" + "xb-", "123456789012-1234567890123-" + mixed(24)),
    token("Slack, app", "slack_token", "xa" + "pp-", "1-A012-123456-" + HEX[:64]),
    token(
        "Slack, webhook",
        "slack_token",
        "https://hooks.slack" + ".com/",
        f"services/T01/B01/{mixed(24)}",
    ),
    token("Databricks", "databricks_token", "da" + "pi", HEX[:32]),
    token("Databricks, numbered", "databricks_token", "da" + "pi", HEX[:32] + "-2"),
    token("Vault, service", "vault_token", "hv" + "s.", mixed(90)),
    token("Vault, batch", "vault_token", "hv" + "b.", mixed(120)),
    token("AWS id", "aws_key", "AK" + "IA", "IOSFODNN7EXAMPLE"),
    token("AWS temporary id", "aws_key", "AS" + "IA", "IOSFODNN7EXAMPLE"),
    within(
        "AWS secret",
        "aws_key",
        "AWS_SECRET" + "_ACCESS_KEY={}",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    ),
    within(
        "AWS secret, ini",
        "aws_key",
        "aws_secret" + "_access_key = {}",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    ),
    within(
        "AWS secret, JSON",
        "aws_key",
        '{{"Secret' + 'AccessKey": "{}"}}',
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    ),
    within("Azure storage", "azure_storage_key", "{}", "Account" + "Key=" + mixed(86) + "=="),
    token("Azure client", "azure_secret", "abc8" + "Q~", mixed(34)),
    within(
        "Azure bus",
        "azure_secret",
        "Endpoint=sb://x.net/;{}",
        "Shared" + "AccessKey=" + mixed(43) + "=",
    ),
    within(
        "Azure SAS",
        "azure_secret",
        "https://x.blob.core.windows.net/c?sv=2022&{}",
        "sig=" + mixed(43) + "%3D",
    ),
    token("Stripe, live", "stripe_key", "sk" + "_live_", mixed(24)),
    token("Stripe, longer", "stripe_key", "sk" + "_live_", mixed(99)),
    token("Stripe, restricted", "stripe_key", "rk" + "_live_", mixed(24)),
    token("Stripe, test", "stripe_key", "sk" + "_test_", mixed(24)),
    token("Stripe, webhook", "stripe_key", "wh" + "sec_", mixed(32)),
    token("Square", "square_token", "sq0" + "csp-", mixed(43)),
    token("Square, access", "square_token", "sq0" + "atp-", mixed(22)),
    token("SendGrid", "sendgrid_key", "S" + "G.", mixed(22) + "." + mixed(43)),
    token("Mailchimp", "mailchimp_key", "", HEX[:32] + "-us12"),
    token("Mailgun", "service_token", "ke" + "y-", HEX[:32]),
    token("Twilio, account", "twilio_key", "A" + "C", HEX[:32]),
    token("Twilio, key", "twilio_key", "S" + "K", HEX[:32]),
    token("npm", "npm_token", "np" + "m_", mixed(36)),
    token("PyPI", "pypi_token", "py" + "pi-", "AgEIcHlwaS5vcmc" + mixed(140)),
    token("Discord bot", "discord_token", "M" + mixed(23), "." + mixed(6) + "." + mixed(27)),
    within(
        "Discord webhook",
        "discord_token",
        "https://discord.com{}",
        "/api/web" + f"hooks/123456789012345678/{mixed(68)}",
    ),
    token("Telegram", "telegram_token", "123456789:", "AA" + mixed(33)),
    within("PEM, RSA", "private_key", "{}", PEM.format("RSA PRIVATE")),
    within("PEM, PKCS 8", "private_key", "{}", PEM.format("PRIVATE")),
    within("PEM, OpenSSH", "private_key", "{}", PEM.format("OPENSSH PRIVATE")),
    within("PEM, no end", "private_key", "{}", PEM.format("EC PRIVATE").partition("-----END")[0]),
    within(
        "PGP",
        "private_key",
        "{}",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nabc\n-----END PGP PRIVATE KEY BLOCK-----",
    ),
    within(
        "PuTTY", "private_key", "{}", "PuTTY-User-Key-File" + "-2: ssh-rsa\nAAAA\nPrivate-MAC: 0a1b"
    ),
    token("JWT", "jwt", "", JWT),
    within("JWT, assigned", "jwt", "https://x.net/?jwt={}", JWT),
    within("URL", "basic_auth", "postgres://bob:{}@host/db", "hunter2"),
    within("URL, special", "basic_auth", "https://bob:{}@host.net/", "p$ss!w0rd,&*"),
    within("URL, no user", "basic_auth", "redis://:{}@cache:6379/0", "foobared"),
    within("URL, token", "basic_auth", "https://{}@githost/x.git", mixed(30)),
    within("Bearer", "auth_header", "Authorization: Bearer {}", mixed(32)),
    within("Bearer, curl", "auth_header", "curl -H 'authorization: bearer {}'", mixed(32)),
    within("Basic", "auth_header", "Authorization: Basic {}", BASIC),
    within("Bearer, capitals", "auth_header", "AUTHORIZATION: BEARER {}", mixed(32)),
    within("Basic, small", "auth_header", "authorization: basic {}", BASIC),
    within("Basic, capitals", "auth_header", "AUTHORIZATION: BASIC {}", BASIC),
    token("Airtable", "service_token", "pat", mixed(14) + "." + HEX[:64]),
    within("env secret", "secret_value", "CLIENT_SECRET={}", "correcthorse"),
    within("env token", "secret_value", "export DEPLOY_TOKEN={}", "zyxwvutsrq"),
    within("env password", "secret_value", "DB_PASSWORD={}", "hunter2"),
    within("env key", "secret_value", "ACME_API_KEY='{}'", mixed(24)),
    within("env private", "secret_value", "SIGNING_KEY={}", mixed(24)),
    within("env passwd", "secret_value", "MYSQL_PASSWD={}", "hunter2"),
    within("env passphrase", "secret_value", "KEY_PASSPHRASE={}", "correct-horse"),
    within("env pwd", "secret_value", "PGPWD={}", "hunter2"),
    within("access key", "secret_value", "access_key: '{}'", mixed(24)),
    within("TOML", "secret_value", 'password = "{}"', "hunter2!"),
    within("YAML", "secret_value", "password: {}", "Summer2024!"),
    within("JSON", "secret_value", '{{"client_secret": "{}"}}', mixed(24)),
    within("query", "secret_value", "https://x.net/?api_key={}&q=1", mixed(24)),
    within("x-api-key", "secret_value", "x-api-key: {}", mixed(24)),
    within("e-mail", "email", "Write to {} today.", "ann.lee+x@mail.kestrel-freight.com"),
    within("e-mail, long line", "email", "-" * 80 + "{}", "ann.lee@kestrel-freight.com"),
    within("e-mail, IDN", "email", "Write to {} today.", "jörg@müller-spedition.de"),
    within("phone", "phone", "Call {} now", "+49 30 901820"),
    within("IBAN", "iban", "Pay {} please", "DE89 3704 0044 0532 0130 00"),
    within("IBAN, French", "iban", "Pay {} please", "FR14 2004 1010 0505 0001 3M02 606"),
    within("Visa", "credit_card", "Card {} it is", "4111 1111 1111 1111"),
    within("Amex", "credit_card", "Card {} it is", "378282246310005"),
    within("Mastercard", "credit_card", "Card {} it is", "5555-5555-5555-4444"),
    within("SSN", "us_ssn", "SSN {}.", "536-90-4399"),
    token("DigitalOcean", "service_token", "do" + "p_v1_", HEX[:64]),
    token("Docker", "service_token", "dckr" + "_pat_", mixed(27)),
    token("Figma", "service_token", "fi" + "gd_", mixed(40)),
    token("Fly.io", "service_token", "fm" + "2_", mixed(60)),
    token("Grafana", "service_token", "gl" + "sa_", mixed(32) + "_" + HEX[:8]),
    token("Groq", "service_token", "gs" + "k_", mixed(52)),
    token("HubSpot", "service_token", "pat-" + "na1-", "0f1e2d3c-aaaa-bbbb-cccc-0123456789ab"),
    token("LangSmith", "service_token", "lsv2" + "_pt_", HEX[:32] + "_" + HEX[:10]),
    token("Linear", "service_token", "lin" + "_api_", mixed(40)),
    token("New Relic", "service_token", "NR" + "AK-", mixed(27).upper()),
    token("Notion", "service_token", "nt" + "n_", mixed(46)),
    token("NVIDIA", "service_token", "nv" + "api-", mixed(64)),
    token("Perplexity", "service_token", "pp" + "lx-", mixed(48)),
    token("Pinecone", "service_token", "pc" + "sk_", mixed(60)),
    token("Postman", "service_token", "PM" + "AK-", HEX[:24] + "-" + HEX[:34]),
    token("Replicate", "service_token", "r8" + "_", mixed(37)),
    token("Sentry", "service_token", "sn" + "trys_", mixed(90)),
    token("Shopify", "service_token", "sh" + "pat_", HEX[:32]),
    token("Supabase", "service_token", "sb" + "p_", HEX[:40]),
    token("Tavily", "service_token", "tv" + "ly-", mixed(32)),
    token("Terraform Cloud", "service_token", mixed(14), ".atlas" + "v1." + mixed(64)),
    token("Atlassian", "service_token", "ATA" + "TT3", mixed(180) + "=0A1B2C3D"),
    token("xAI", "service_token", "xa" + "i-", mixed(80)),
)

KEY = "AK" + "IA" + "IOSFODNN7EXAMPLE"
MAIL = "ann.lee@kestrel-freight.com"
ESCAPED = MAIL.replace("@", "\\u0040")


def _call(**changes: Any) -> dict[str, Any]:
    function = {"name": "send", "arguments": "{}"} | changes.pop("function", {})
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function} | changes],
    }


PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "a part of the content": (
        {"role": "user", "content": [{"type": "text", "text": f"to {MAIL}"}]},
        "kestrel",
    ),
    "id of a call": (_call(id=KEY), KEY),
    "tool_call_id": ({"role": "tool", "tool_call_id": KEY, "content": "done"}, KEY),
    "type": ({"role": "user", "content": [{"type": KEY, "text": "x"}]}, KEY),
    "id of a part": ({"role": "user", "content": [{"type": "text", "id": KEY, "text": "x"}]}, KEY),
    "name of a message": ({"role": "user", "name": KEY, "content": "x"}, KEY),
    "name of a function": (_call(function={"name": KEY}), KEY),
    "key of an object": ({"role": "user", "content": [{"type": "text", "text": "x", KEY: 1}]}, KEY),
    "key in arguments": (_call(function={"arguments": json.dumps({KEY: 1})}), KEY),
    "a number": ({"role": "user", "content": [{"type": "x", "card": 4111111111111111}]}, "41111"),
    "a number in arguments": (_call(function={"arguments": '{"card": 4111111111111111}'}), "41111"),
    "an escape in arguments": (_call(function={"arguments": f'{{"to": "{ESCAPED}"}}'}), "kestrel"),
    "an escaped letter": (
        _call(function={"arguments": '{"k": "\\u0041' + KEY[1:] + '"}'}),
        KEY[1:],
    ),
    "JSON in JSON": (
        _call(function={"arguments": json.dumps({"body": json.dumps({"to": MAIL + "\n"})})}),
        "kestrel",
    ),
    "escapes in JSON in JSON": (
        _call(function={"arguments": json.dumps({"body": f'{{"to": "{ESCAPED}"}}'})}),
        "kestrel",
    ),
    "after an escaped line's end": (
        {"role": "tool", "tool_call_id": "c", "content": json.dumps({"out": f"\n{KEY}\n"})},
        KEY,
    ),
    "broken JSON": (_call(function={"arguments": f'{{"to": "{ESCAPED}'}), "kestrel"),
    "text that begins with data:": (
        {"role": "user", "content": f'data: {{"mail": "{MAIL}"}}'},
        "kestrel",
    ),
    "a data URL without base64": (
        {"role": "user", "content": f"data:text/plain,{MAIL}"},
        "kestrel",
    ),
    "text after a data URL": (
        {"role": "user", "content": f"data:image/png;base64,AAAA {MAIL}"},
        "kestrel",
    ),
    "the head of a data URL": (
        {"role": "user", "content": f"data:image/{KEY};base64,AAAA"},
        KEY,
    ),
}
"""Messages that hold something at a place, and text of which nothing may stay."""
